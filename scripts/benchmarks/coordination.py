"""Jobs per second of a no-op operation, relative to the writes that etcd accepts from a bare loop in the same run.

The bare loop writes three puts (100, 10 and 300 bytes, like a claim, a state and an outcome) and one delete (of a
claim) per job, in transactions of 120 operations with 12 in flight. It is independent of what distop writes.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

import grpc
import grpc.aio

from benchmarks.common import Cluster, EtcdProbe, Result, Row, cluster, median, report_progress
from distop.protocol.records import TableRecord
from distop.store._proto import rpc_pb2 as rpc

TABLE = "bench.noop"
JOBS_PER_TXN = 30
IN_FLIGHT = 12
CLAIM, STATE, OUTCOME = b"c" * 100, b"s" * 10, b"o" * 300
PREFIX = b"raw."


def run(jobs: int = 10_000, executors: int = 2, runs: int = 5) -> Result:
    """Alternate raw and distop ``runs`` times; the medians and their ratio."""
    with cluster(executors) as bench:
        result = Result(
            "coordination",
            {"jobs": jobs, "executors": executors, "runs": runs, "etcd": EtcdProbe(bench.endpoint).version()},
        )
        bench.client.add_table(TableRecord(TABLE, "parquet", "/nowhere"), check=False)
        for warm in (1_000, jobs):
            _distop(bench, warm)
        asyncio.run(_raw(bench.endpoint, 3_000))
        raw: list[float] = []
        ours: list[float] = []
        for n in range(runs):
            raw.append(asyncio.run(_raw(bench.endpoint, jobs)))
            ours.append(_distop(bench, jobs))
            report_progress(f"coordination {n + 1}/{runs}: raw {raw[-1]:,.0f}, distop {ours[-1]:,.0f} jobs/s")
    ratio = median(ours) / median(raw)
    result.samples = {"raw": raw, "distop": ours}
    result.rows = [
        Row("no-op jobs, call to history record", median(ours), "jobs/s", 5_000, at_most=False),
        Row("bare loop on this etcd", median(raw), "jobs/s"),
        Row("distop relative to the bare loop", ratio, "×", 0.35, at_most=False, note="long-term aim: 0.5"),
    ]
    return result


def _distop(bench: Cluster, jobs: int) -> float:
    """Jobs per second of one operation, from the call to the history record; then waits for its cleanup."""
    began = time.perf_counter()
    done = bench.client.start_operation("noop", TABLE, {"jobs": jobs}).wait(600)
    seconds = time.perf_counter() - began
    if done.state != "success" or done.jobs["success"] != jobs:
        raise RuntimeError(f"The no-op operation ended as {done.state}: {done.errors}")
    bench.wait_for_cleanup()
    return jobs / seconds


# ---------------------------------------------------------------------- raw


@dataclass(slots=True)
class _BareClient:
    """The calls of a minimal etcd client: grpcio with distop's messages."""

    txn: grpc.aio.UnaryUnaryMultiCallable[rpc.TxnRequest, rpc.TxnResponse]
    delete: grpc.aio.UnaryUnaryMultiCallable[rpc.DeleteRangeRequest, rpc.DeleteRangeResponse]


async def _raw(endpoint: str, jobs: int) -> float:
    """Jobs per second of the bare loop.

    Each transaction of a lane deletes the claims of the lane's previous one, so that every delete finds its key. The
    claims that the first one deletes are put before the measurement.
    """
    options = [("grpc.max_receive_message_length", -1)]
    async with grpc.aio.insecure_channel(endpoint, options=options) as channel:
        bare = _BareClient(
            channel.unary_unary(
                "/etcdserverpb.KV/Txn",
                request_serializer=rpc.TxnRequest.SerializeToString,
                response_deserializer=rpc.TxnResponse.FromString,
            ),
            channel.unary_unary(
                "/etcdserverpb.KV/DeleteRange",
                request_serializer=rpc.DeleteRangeRequest.SerializeToString,
                response_deserializer=rpc.DeleteRangeResponse.FromString,
            ),
        )
        lanes = [list(range(lane, -(-jobs // JOBS_PER_TXN), IN_FLIGHT)) for lane in range(IN_FLIGHT)]
        for lane in range(IN_FLIGHT):
            first = rpc.TxnRequest()
            for n in range(JOBS_PER_TXN):
                _put(first, _claim(lane, -1, n), CLAIM)
            await bare.txn(first)
        began = time.perf_counter()
        await asyncio.gather(*(_lane(bare, lane, groups, jobs) for lane, groups in enumerate(lanes)))
        seconds = time.perf_counter() - began
        for lane in range(IN_FLIGHT):
            start = PREFIX + b"%02d." % lane
            await bare.delete(rpc.DeleteRangeRequest(key=start, range_end=start[:-1] + b"/"))
    return jobs / seconds


async def _lane(bare: _BareClient, lane: int, groups: list[int], jobs: int) -> None:
    for turn, group in enumerate(groups):
        request = rpc.TxnRequest()
        for n in range(min(JOBS_PER_TXN, jobs - group * JOBS_PER_TXN)):
            job = PREFIX + b"%02d.job.%06d" % (lane, turn * JOBS_PER_TXN + n)
            _put(request, _claim(lane, turn, n), CLAIM)
            _put(request, job + b".state", STATE)
            _put(request, job + b".outcome", OUTCOME)
            request.success.add().request_delete_range.key = _claim(lane, turn - 1, n)
        if not (await bare.txn(request)).succeeded:
            raise RuntimeError("etcd rejected a transaction of the bare loop")


def _claim(lane: int, turn: int, n: int) -> bytes:
    return PREFIX + b"%02d.claim.%06d" % (lane, (turn + 1) * JOBS_PER_TXN + n)


def _put(request: rpc.TxnRequest, key: bytes, value: bytes) -> None:
    put = request.success.add().request_put
    put.key = key
    put.value = value
