"""``unique`` and ``references`` of validate, relative to hand-written statements in one warm session.

TPC-H lineitem in 84 monthly partitions: ``unique`` on its key; ``references`` to two tables of order keys, one of which
lacks some keys.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.common import CACHE, Result, report_progress
from benchmarks.statement import VIEW
from benchmarks.validate import Case, lineitem, measure

WARM = 5
"""Warm-up rounds: fewer than for scans, because a round takes seconds, most of them in the shuffle."""
ORDERS, SOME = "orders", "some_orders"


def run(scale: float = 1, runs: int = 5, lives: int = 1) -> Result:
    """Like ``benchmarks.validate.run``."""
    result = Result("unique", {"scale": scale, "runs": runs, "lives": lives})
    subject = lineitem(scale)
    return measure(result, subject, _cases(_orders(subject.location, scale)), warm=WARM)


def _cases(orders: Mapping[str, Path]) -> list[Case]:
    repeated = "SELECT count(*) FROM (SELECT {0} FROM {1} GROUP BY {0} HAVING count(*) > 1)"
    alone = "SELECT count(*) FROM {0} LEFT ANTI JOIN {1} ON l_orderkey = o_orderkey"

    def case(name: str, check: Mapping[str, Any], sql: str, statistics: str = "never", **others: Path) -> Case:
        return Case(name, [(check, "")], statistics, 1.2, sql, others)

    def refers(other: str) -> dict[str, Any]:
        return {"references": {"column": "l_orderkey", "table": other, "to": "o_orderkey"}}

    key = ["l_orderkey", "l_linenumber"]
    key_and_month = ["ship_month", *key]
    sql = repeated.format(", ".join(key_and_month), VIEW)
    return [
        case("unique, a key of two numbers", {"unique": key}, repeated.format(", ".join(key), VIEW)),
        case("unique, the same with the month", {"unique": key_and_month}, sql, "auto"),
        case("references, all found", refers(ORDERS), alone.format(VIEW, ORDERS), **{ORDERS: orders[ORDERS]}),
        case("references, some not found", refers(SOME), alone.format(VIEW, SOME), **{SOME: orders[SOME]}),
    ]


def _orders(lineitem: Path, scale: float) -> dict[str, Path]:
    """Two tables, generated once per scale: all order keys, and all but one in sixteen."""
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.dataset as ds
    import pyarrow.parquet as pq

    target = CACHE / f"orders-{scale:g}"
    if not target.exists():
        report_progress(f"unique: generating the order keys at scale {scale:g}")
        keys = pc.unique(ds.dataset(lineitem, format="parquet").to_table(columns=["l_orderkey"])["l_orderkey"])
        some_keys = keys.filter(pc.not_equal(pc.bit_wise_and(keys, 15), 0))
        scratch = Path(tempfile.mkdtemp(dir=CACHE))
        try:
            for name, order_keys in ((ORDERS, keys), (SOME, some_keys)):
                (scratch / name).mkdir()
                pq.write_table(pa.table({"o_orderkey": order_keys}), scratch / name / "part-0.parquet")
            scratch.rename(target)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return {name: target / name for name in (ORDERS, SOME)}
