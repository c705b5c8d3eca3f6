"""The ten checks of ``validate`` with Great Expectations on Spark, and as a statement. Prints counts and seconds.

Run by an environment with the packages great_expectations and pyspark. Great Expectations counts the violations of each
expectation in a statement or more of its own.
"""

from __future__ import annotations

import json
import os
import sys
import time

import great_expectations as gx
import great_expectations.expectations as gxe
from pyspark.sql import SparkSession


def expectations() -> list[gxe.Expectation]:
    """The checks, in the order of the benchmark of validate."""
    return [
        gxe.ExpectColumnValuesToNotBeNull(column="l_orderkey"),
        gxe.ExpectColumnValuesToNotBeNull(column="l_shipdate"),
        gxe.ExpectColumnValuesToBeBetween(column="l_quantity", min_value=1, max_value=50),
        gxe.ExpectColumnValuesToBeBetween(column="l_linenumber", min_value=1, max_value=7),
        gxe.ExpectColumnPairValuesAToBeGreaterThanB(
            column_A="l_receiptdate", column_B="l_shipdate", or_equal=True, ignore_row_if="either_value_is_missing"
        ),
        gxe.UnexpectedRowsExpectation(
            unexpected_rows_query="SELECT 1 FROM {batch} WHERE NOT (l_extendedprice * (1 - l_discount) > 0)"
        ),
        gxe.UnexpectedRowsExpectation(
            unexpected_rows_query="SELECT 1 FROM {batch} WHERE NOT (l_quantity < 50 OR l_tax > 0)"
        ),
        gxe.ExpectColumnValuesToBeInSet(column="l_returnflag", value_set=["A", "N", "R"]),
        gxe.ExpectColumnValueLengthsToBeBetween(column="l_shipmode", min_value=3, max_value=7),
        gxe.ExpectColumnValuesToMatchRegex(column="l_shipinstruct", regex="^[A-Z ]+$"),
    ]


def count(result: dict[str, object]) -> int:
    """The violations in a result."""
    if "unexpected_count" in result:
        return int(str(result["unexpected_count"]))
    return int(str(result["observed_value"]))


def main() -> None:
    """Warm up, and measure both in turn."""
    options = json.loads(sys.argv[1])
    cores = len(os.sched_getaffinity(0))
    spark = (
        SparkSession.builder.master(f"local[{cores}]")
        .config("spark.ui.enabled", "false")
        .config("spark.sql.shuffle.partitions", str(cores))
        .config("spark.log.level", "ERROR")
        .getOrCreate()
    )
    frame = spark.read.parquet(options["location"])
    frame.createOrReplaceTempView("hand_written")
    context = gx.get_context(mode="ephemeral")
    context.variables.progress_bars = gx.data_context.types.base.ProgressBarsConfig(globally=False)
    asset = context.data_sources.add_spark("spark").add_dataframe_asset("lineitem")
    batch = asset.add_batch_definition_whole_dataframe("all").get_batch({"dataframe": frame})
    suite = context.suites.add(gx.ExpectationSuite(name="ten", expectations=expectations()))
    seconds: list[float] = []
    by_hand: list[float] = []
    for n in range(options["warm"] + options["runs"]):
        began = time.perf_counter()
        (row,) = spark.sql(options["statement"]).collect()
        done = time.perf_counter()
        found = batch.validate(suite, result_format="BASIC")
        ended = time.perf_counter()
        if n >= options["warm"]:
            by_hand.append(done - began)
            seconds.append(ended - done)
    counts = [count(one.result) for one in found.results]
    if counts != list(row):
        raise RuntimeError(f"Great Expectations counts {counts}, the statement {list(row)}")
    print(json.dumps({"counts": counts, "seconds": seconds, "by_hand": by_hand}))


if __name__ == "__main__":
    main()
