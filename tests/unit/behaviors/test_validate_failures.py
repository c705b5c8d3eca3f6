"""Classification of Spark's errors by their text."""

from __future__ import annotations

import pytest

from distop_behaviors.validate import spark_errors
from distop_behaviors.validate.spark_errors import _GONE_TASK, _STOPPED

_LOST = (
    "Job aborted due to stage failure: Task 0 in stage 1.0 failed 4 times, most recent failure: Lost task 0.3 in stage "
)


@pytest.mark.parametrize(
    "text",
    [
        _LOST + "1.0 (TID 7) (192.0.2.2 executor 1): ExecutorLostFailure (executor 1 exited caused by ...",
        _LOST + "1.0 (TID 7) ([::1] executor driver): TaskKilled (Stage cancelled)",
        _LOST + "1.0 (TID 7): FetchFailed(BlockManagerId(1, host, 7337, None), ...",
        _LOST + "1.0 (TID 7) (host executor 1): java.lang.OutOfMemoryError: Java heap space",
        "Job aborted due to stage failure: Total size of serialized results of 9 tasks is bigger than ...",
    ],
)
def test_errors_of_lost_tasks_are_unexpected(text: str) -> None:
    assert _GONE_TASK.match(text)


@pytest.mark.parametrize(
    "text",
    [
        _LOST + "1.0 (TID 7) (host executor 1): org.apache.spark.SparkException: The value ': ExecutorLostFailure'",
        "The value 'Job aborted due to stage failure: x' cannot be cast",
        "[CAST_INVALID_INPUT] The value 'cancelled' cannot be cast",
    ],
)
def test_quoted_words_do_not_classify_an_error(text: str) -> None:
    assert not _GONE_TASK.match(text)
    assert not _STOPPED.match(text)


@pytest.mark.parametrize(
    "text",
    [
        "Job 3 cancelled because SparkContext was shut down",
        "Cannot call methods on a stopped SparkContext.\nThis stopped SparkContext was created at: ...",
        "SparkContext has been shut down",
    ],
)
def test_errors_of_a_stopped_context_are_unexpected(text: str) -> None:
    assert _STOPPED.match(text)


def test_the_message_of_a_task_is_reported_without_the_task() -> None:
    """The number of a task is of no use, and differs between partitions."""
    thrown = "java.lang.IllegalArgumentException: Malformed pattern"
    text = f"{_LOST}1.0 (TID 7) (192.0.2.2 executor driver): {thrown}\n\tat java.base/java.text.DecimalFormat"
    assert spark_errors.message_of(Exception(text)) == thrown


_FILE = (
    "org.apache.spark.SparkException",
    "[FAILED_READ_FILE.NO_HINT] Encountered error while reading file file:///t/a.",
)


@pytest.mark.parametrize(
    ("causes", "why"),
    [
        (
            [
                (
                    "java.lang.IllegalArgumentException",
                    "java.net.URISyntaxException: Relative path in absolute URI: .a:b",
                ),
                ("java.net.URISyntaxException", "Relative path in absolute URI: .a:b.parquet.crc"),
            ],
            "its name contains ':', which Hadoop does not allow: rename it",
        ),
        (
            [("x.BadConfigurationException", "Class org.apache.hadoop.io.compress.BrotliCodec was not found")],
            "Spark has no codec Brotli (the class org.apache.hadoop.io.compress.BrotliCodec)",
        ),
        (
            [("org.apache.spark.SparkUnsupportedOperationException", "Unsupported encoding: BYTE_STREAM_SPLIT")],
            "Spark cannot read the encoding BYTE_STREAM_SPLIT",
        ),
        (
            [("org.apache.parquet.crypto.ParquetCryptoRuntimeException", "Null File Decryptor\nmore")],
            "it is encrypted: Null File Decryptor",
        ),
        (
            [("org.apache.spark.sql.AnalysisException", "Invalid Spark read type: expected a map\n  of things")],
            "Spark cannot read its schema: Invalid Spark read type: expected a map",
        ),
        (
            [("x.AnalysisException", "Invalid Spark read type: expected group v (VARIANT(1)) {\n  required binary")],
            "Spark cannot read its schema: Invalid Spark read type: expected group v (VARIANT(1))",
        ),
        (
            [("x.InvalidRecordException", "c not found in message schema {\n  optional int32 b")],
            "it is damaged, or in a form that Spark cannot read "
            "(InvalidRecordException: c not found in message schema)",
        ),
        (
            [
                ("java.io.IOException", "Expected 1 values at file:/t/a.parquet offset 19"),
                ("java.io.EOFException", "the end"),
            ],
            "it is damaged, or in a form that Spark cannot read (IOException: Expected 1 values offset 19: the end)",
        ),
        (
            [("java.lang.NullPointerException", "")],
            "it is damaged, or in a form that Spark cannot read (NullPointerException)",
        ),
        ([], ""),
    ],
)
def test_the_reason_why_a_file_cannot_be_read(causes: list[tuple[str, str]], why: str) -> None:
    assert spark_errors.explain_causes([_FILE, *causes]) == why


def test_hole_9_a_long_value_that_spark_quotes_is_handled_in_linear_time() -> None:
    """Spark quotes the whole value: a search in quadratic time blocked all threads of a child."""
    text = f"[CAST_INVALID_INPUT] The value 'y{' ' * 5_000_000}' of the type \"STRING\" cannot be cast. SQLSTATE: 22018"
    found = spark_errors.message_of(Exception(text))
    assert found.startswith("[CAST_INVALID_INPUT] The value 'y")
    assert len(found) <= spark_errors.MAX_SENTENCE
    assert spark_errors.message_of(Exception("[A.B] it is wrong.   SQLSTATE: 22018")) == "[A.B] it is wrong."
