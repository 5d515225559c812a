"""Reads ``[kinds.NAME]`` tables: figures of one's own, or another kind's with changes.

    table + known kinds -> read_kinds -> {name: DeviceProfile}

A table named like a known kind changes that kind; ``base`` starts from another one, or
from nothing (``base = "none"``). The catalog, cluster files and profile files all speak
so; what is read later overrules.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from hexijax.cluster.errors import Form, Place, shown
from hexijax.cluster.profile import PROFILE, DeviceProfile
from hexijax.cluster.record import check_keys
from hexijax.cluster.units import SPEED
from hexijax.cluster.values import NAME
from hexijax.errors import did_you_mean

NO_BASE = "none"
CHANGED = "; changed where declared"


def read_kinds(
    raw: object, place: Place, known: Mapping[str, DeviceProfile]
) -> dict[str, DeviceProfile]:
    """The kinds of a document, in its order; a base may stand above in the same one."""
    if not isinstance(raw, Mapping):
        place.fail(f"is {shown(raw)}; it must be a table of kinds: [kinds.NAME].")
    found: dict[str, DeviceProfile] = {}
    for name, table in raw.items():
        NAME.read(name, place.at(str(name)[:60]))
        found[name] = _read_kind(name, table, place.at(name), {**known, **found})
    return found


def write_kinds(
    profiles: tuple[DeviceProfile, ...], form: Form, known: Mapping[str, DeviceProfile]
) -> dict[str, dict[str, Any]]:
    """The tables from which ``read_kinds`` makes the profiles that are not known."""
    tables = {}
    for profile in profiles:
        if form is Form.FILE and profile == known.get(profile.kind):
            continue
        table = PROFILE.write(profile, form)
        del table["kind"]
        base = {"base": NO_BASE} if profile.kind in known else {}
        tables[profile.kind] = base | table
    return tables


def _read_kind(
    name: str, table: object, place: Place, known: Mapping[str, DeviceProfile]
) -> DeviceProfile:
    """One kind: its base's figures, then its own."""
    if not isinstance(table, Mapping):
        place.fail(f"is {shown(table)}; it must be a table: [kinds.{name}].")
    names = tuple(k.spelled(place.form) for k in PROFILE.keys if k.field != "kind")
    check_keys(table, ("base", "speed", *names), place)
    own = {key: value for key, value in table.items() if key not in ("base", "speed")}
    base = _base(name, table.get("base", name), place, known)
    fields = _figures(base) | {"kind": name}
    if "speed" in table:
        fields |= _scaled(base, SPEED.read(table["speed"], place.at("speed")), place)
    given = PROFILE.given(own, place)
    if "nominal_memory_bytes" in given:
        fields.pop("usable_memory_bytes", None)  # the rule's, of the new memory
    if "dense_flops_per_s" in given:  # one by one: a base's other peaks stand
        given["dense_flops_per_s"] = {
            **fields.get("dense_flops_per_s", {}),
            **given["dense_flops_per_s"],
        }
    if base and given.keys() - {"source"}:
        fields["source"] = fields["source"].removesuffix(CHANGED) + CHANGED
    merged = fields | given
    # Without a base and a vendor it was hardly meant to be new: its name is misspelt.
    hint = "" if "vendor" in merged else did_you_mean(name, known)
    return PROFILE.build(merged, place, hint=hint)


def _base(
    name: str, asked: object, place: Place, known: Mapping[str, DeviceProfile]
) -> DeviceProfile | None:
    """The kind to start from; an own name that nobody knows starts from nothing."""
    if asked == NO_BASE or (asked == name and name not in known):
        return None
    if not isinstance(asked, str) or asked not in known:
        guess = did_you_mean(asked, known) if isinstance(asked, str) else ""
        place.at("base").fail(
            f"is {shown(asked)}, which is no kind of the catalog or above in this "
            f"file.{guess} `hexijax catalog` lists the kinds."
        )
    return known[asked]


def _figures(base: DeviceProfile | None) -> dict[str, Any]:
    """A base's fields, or none."""
    if base is None:
        return {}
    return {f.name: getattr(base, f.name) for f in dataclasses.fields(base)}


def _scaled(base: DeviceProfile | None, speed: float, place: Place) -> dict[str, Any]:
    """A base's peaks times ``speed``; its measured layer times no longer hold."""
    if base is None:
        place.at("speed").fail(
            f"is {speed:g} times nothing: the kind has no base. Add `base = ...`, or "
            "give peak_tflops instead."
        )
    peaks = {dtype: peak * speed for dtype, peak in base.dense_flops_per_s.items()}
    source = f"{base.source}; peaks times {speed:g}"
    return {"dense_flops_per_s": peaks, "layer_times": (), "source": source}
