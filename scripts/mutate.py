"""Generate mutants and look for what kills each; see ``scripts/mutate --help``."""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import os
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # tests.support

from mutating import source_mutants, transaction_mutants
from mutating.catalogue import LAYERS, UNIT, Catalogue, Place, collected
from mutating.search import TRIED, Hunt, Verdict, breaches_without_mutant, hunt
from mutating.transaction_mutants import CALLERS, GUARD, GUARDS, WRITE, WRITES, Mutant

ROOT = Path(__file__).resolve().parent.parent
CACHES = ROOT / ".cache"
FOLDERS = (
    "tests/unit",
    "tests/simulation",
    "tests/integration/test_time_limit_of_jobs.py",
    "tests/integration/test_worker_calls.py",
    "tests/integration/test_worker_guardian.py",
    "tests/integration/test_worker_runs.py",
)
ON_THE_STORE = re.compile(r"tests\.(support\.(world|random_events)|unit\.support\.(modelclient|model_submission))")
"""Imports of unit tests that apply transactions; for a sample only these tests are observed."""
EXPLAINED = re.compile(r"^\| `([^`]+: [^`]+)` \| .+ \|$", re.MULTILINE)
"""A row of docs/internals/mutants.md."""
PAIRS = 4
"""Pairs of guards that are left out for each guard that survives."""
KINDS = (*transaction_mutants.MODES, *source_mutants.MODES)
WHOLE = dict.fromkeys(GUARDS, GUARD) | dict.fromkeys(WRITES, WRITE)
"""Mode of a mutant of transactions → the mode that leaves out all of the kind."""
LEFT_OUT = (
    "test_planted_bugs.py",
    "test_schedules.py",
    "test_crash_points.py",
    "test_shrinking.py",
    "test_simulate_command.py",
    "test_mutants.py",
    "test_user_transaction_copies.py",
)
"""Test files that run many schedules themselves, or that are about mutants."""
SOURCES = (
    *("distop", "tests/unit", "tests/simulation", "tests/integration", "tests/simulator", "tests/support"),
    "scripts/mutating",
)


class MutationRun:
    """The pytest plugin that replaces pytest's own loop once all tests are collected."""

    def __init__(self, wanted: argparse.Namespace, out: Any) -> None:
        self.wanted = wanted
        self.out = out
        self.code = 1
        self.cache = CACHES / ("mutate-sample.json" if wanted.sample else "mutate.json")

    def print_line(self, text: str) -> None:
        print(text, file=self.out, flush=True)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items = [item for item in session.items if item.path.name not in LEFT_OUT]
        self.code = self.run(items)
        return True

    def run(self, items: Sequence[pytest.Item]) -> int:
        wanted, content, cached = self.wanted, fingerprint(), read_cache(self.cache)
        catalogue = self.catalogue(items, content, cached)
        chosen = sorted(one for one in catalogue.mutants if str(one).startswith(tuple(wanted.only)))
        chosen = [mutant for mutant in chosen if mutant.mode in wanted.kinds and CALLERS not in mutant.what]
        unneeded: list[str] = []
        if wanted.sample:
            usable = [one for one in chosen if catalogue.decisive.get(one) and not reason(str(one), explained())]
            sample = sorted(random.Random(wanted.seed).sample(usable, min(wanted.sample, len(usable))))
            unneeded = decisive_nowhere(catalogue, chosen, {root(one) for one in sample}, explained())
            for name in unneeded:
                self.print_line(f"decisive nowhere, unexplained: {name}")
            chosen = sample
        if wanted.list:
            for mutant in chosen:
                self.print_line(f"{mutant}  ({len(catalogue.decisive.get(mutant, ()))} places)")
            return 0
        known = {name: Verdict(**stored) for name, stored in cached.get("verdicts", {}).items()}
        verdicts = [known[str(mutant)] for mutant in chosen if settled(known.get(str(mutant)), content, wanted)]
        known_now = {one.mutant for one in verdicts}
        opened = {str(mutant): mutant for mutant in chosen if str(mutant) not in known_now}
        by_id = {item.nodeid: item for item in items}
        hunts = [self.hunt(catalogue, mutant, known.get(str(mutant)), by_id) for mutant in opened.values()]
        for n, verdict in enumerate(hunt(hunts, by_id, wanted.jobs), 1):
            verdicts.append(verdict)
            verdict.content = content
            known[verdict.mutant] = verdict
            if n % 50 == 0:
                write_cache(self.cache, content, catalogue, known)
            if wanted.verbose or not verdict.killed:
                self.print_line(f"{n}/{len(hunts)} {verdict.mutant}: {describe(verdict)}")
        self.find_backing(catalogue, verdicts, opened, by_id)
        for verdict, how in breaches_without_mutant([one for one in verdicts if one.mutant in opened], wanted.jobs):
            self.print_line(f"BREACHED WITHOUT A MUTANT: {verdict.killer}: {how} (found with {verdict.mutant})")
        write_cache(self.cache, content, catalogue, known)
        for line in table(verdicts, catalogue):
            self.print_line(line)
        share, unexplained = judged(verdicts, explained())
        self.print_line(
            f"{100 * share:.1f} % of the mutants that are not in docs/internals/mutants.md are killed or backed"
        )
        if not wanted.sample:
            for name in unexplained:
                self.print_line(f"survives unexplained: {name}")
        return int(share < wanted.least or bool(unneeded) if wanted.sample else bool(unexplained))

    def catalogue(self, items: Sequence[pytest.Item], content: str, cached: Any) -> Catalogue:
        wanted = self.wanted
        former = Catalogue.from_json(cached["catalogue"]) if "catalogue" in cached else Catalogue()
        statements = bool({*source_mutants.MODES} & {*wanted.kinds})
        if statements and not former.statements:
            former = Catalogue()
        unchanged = cached.get("content") == content and former.schedules >= wanted.schedules
        if former.mutants and (unchanged or wanted.kept):
            if statements:
                former.mutants |= source_mutants.sites().keys()
            return former
        began = time.perf_counter()
        seeds = range(wanted.first, wanted.first + wanted.schedules)
        hashes = {
            path: hashlib.sha256(Path(path).read_bytes()).hexdigest() for path in {file_of(item) for item in items}
        }
        observed = [item for item in items if former.idle.get(file_of(item)) != hashes[file_of(item)]]
        found = collected(observed, seeds, wanted.lives, wanted.held, wanted.jobs, statements=statements)
        busy = {place.test.partition("::")[0] for places in found.decisive.values() for place, _ in places}
        found.idle = {path: digest for path, digest in hashes.items() if path not in busy}
        verdicts = {name: Verdict(**one) for name, one in cached.get("verdicts", {}).items()}
        write_cache(self.cache, content, found, verdicts)
        self.print_line(
            f"{len(observed)} tests and {len(seeds)} schedules observed in {time.perf_counter() - began:.0f} s"
        )
        for text in found.broken:
            self.print_line(f"fails without a mutant, so it is not used: {text}")
        return found

    def find_backing(
        self,
        catalogue: Catalogue,
        verdicts: Sequence[Verdict],
        opened: dict[str, Mutant],
        items: dict[str, pytest.Item],
    ) -> None:
        """Leave out pairs of guards, to find what backs each guard that survived."""
        survived = [one for one in verdicts if not one.killed and one.mutant in opened]
        pairs = {
            str(pair): pair
            for one in survived
            if opened[one.mutant].mode in GUARDS
            for pair in catalogue.pairs(opened[one.mutant])[:PAIRS]
        }
        hunts = [self.hunt(catalogue, pair, None, items) for pair in pairs.values()]
        killed = {one.mutant: one for one in hunt(hunts, items, self.wanted.jobs) if one.killed}
        alone = [
            Hunt(half(pair, kind, catalogue.mutants), [Place.parse(killed[name].killer)], 1)
            for name, pair in pairs.items()
            if name in killed
            for kind in pair.kinds
        ]
        enough = {(one.mutant, one.killer) for one in hunt(alone, items, self.wanted.jobs) if one.killed}
        for name, pair in pairs.items():
            halves = [str(half(pair, kind, catalogue.mutants)) for kind in pair.kinds]
            if name in killed and any((one, killed[name].killer) in enough for one in halves):
                del killed[name]  # one of the two alone is killed there, so the pair proves nothing
        for one in survived:
            mutant = opened[one.mutant]
            for pair in catalogue.pairs(mutant)[:PAIRS]:
                if str(pair) in killed and not one.backed:
                    (other,) = (kind for kind in pair.kinds if kind != mutant.what)
                    one.backed = f"{other}; both left out: {describe(killed[str(pair)])}"

    def hunt(self, catalogue: Catalogue, mutant: Mutant, known: Verdict | None, items: dict[str, pytest.Item]) -> Hunt:
        tried = self.wanted.tries
        # For a mutant with a documented reason only unit tests run, to see whether its row can be removed.
        layers = (UNIT,) if reason(str(mutant), explained()) else LAYERS
        places = [place for layer in layers for place in catalogue.places(mutant, layer)[: tried or TRIED[layer]]]
        if known is not None and known.killed:
            former = Place.parse(known.killer)
            if (not former.test or former.test in items) and known.killer not in catalogue.broken:
                places = [former, *places]
        return Hunt(mutant, places, len(catalogue.decisive.get(mutant, ())))


def half(pair: Mutant, kind: str, built: Collection[Mutant]) -> Mutant:
    """One of the two guards of a pair; all compares of its kind where no transaction has several."""
    alone = replace(pair, what=kind)
    return alone if alone in built else replace(alone, mode=GUARD)


def file_of(item: pytest.Item) -> str:
    """The file of a test."""
    return item.nodeid.partition("::")[0]


def settled(known: Verdict | None, content: str, wanted: argparse.Namespace) -> bool:
    """Whether a verdict on the same code can be kept."""
    return known is not None and known.content == content and (known.killed or not wanted.again)


def describe(verdict: Verdict) -> str:
    """A verdict as text."""
    if verdict.killed:
        return f"{verdict.layer}: {verdict.killer}: {verdict.how}"
    if verdict.backed:
        return f"backed by {verdict.backed}"
    if not verdict.decisive:
        return "SURVIVES: it is decisive nowhere"
    return f"SURVIVES: decisive in {verdict.decisive} places, run in {verdict.places} of them"


def table(verdicts: Sequence[Verdict], catalogue: Catalogue) -> Iterator[str]:
    """Kills by layer for each kind of mutant, then what survived."""
    kinds = sorted({kind(one.mutant) for one in verdicts})
    known = explained()
    yield row("mutants of", "all", *LAYERS, "hang", "killed", "backed", "explained", "open")
    for one in [*kinds, "all"]:
        alike = [verdict for verdict in verdicts if one in ("all", kind(verdict.mutant))]
        layers = Counter(verdict.layer for verdict in alike)
        hangs = sum(verdict.how == "hang" for verdict in alike)
        share = f"{100 * sum(verdict.killed for verdict in alike) / max(1, len(alike)):.1f} %"
        backed = sum(bool(verdict.backed) for verdict in alike)
        others = [verdict for verdict in alike if not verdict.killed and not verdict.backed]
        listed = sum(bool(reason(verdict.mutant, known)) for verdict in others)
        counts = (layers[layer] for layer in LAYERS)
        yield row(one, len(alike), *counts, hangs, share, backed, listed, len(others) - listed)
    survivors = sorted((one for one in verdicts if not one.killed), key=lambda one: one.mutant)
    for verdict in survivors:
        why = "explained in docs/internals/mutants.md: " if reason(verdict.mutant, known) else ""
        yield f"{verdict.mutant}: {why}{describe(verdict)}"
    for verdict in verdicts:
        if verdict.killed and verdict.mutant in known:
            yield f"{verdict.mutant}: it is killed, so its row in docs/internals/mutants.md can be removed"
    built = {mutant.place for mutant in catalogue.mutants if mutant.mode not in source_mutants.MODES}
    never = sorted(built - {mutant.place for mutant in catalogue.simulated})
    yield f"labels of transactions that no schedule builds: {', '.join(never) or 'none'}"


def decisive_nowhere(
    catalogue: Catalogue, mutants: Collection[Mutant], labels: Collection[str], known: Collection[str]
) -> list[str]:
    """The mutants of transactions with these labels that no place needs and nothing explains.

    No sample contains such a mutant. A guard is needed where it refuses a transaction alone, or with one other guard.
    """
    pairs = {
        (pair.place, pair.mode, kind)
        for pair, places in catalogue.decisive.items()
        if places and len(pair.kinds) > 1
        for kind in pair.kinds
    }
    return sorted(
        str(one)
        for one in mutants
        if one.mode in transaction_mutants.MODES
        and root(one) in labels
        and not catalogue.decisive.get(one)
        and (one.place, one.mode, one.what) not in pairs
        and not reason(str(one), known)
    )


def root(mutant: Mutant) -> str:
    """The label of the whole transaction, of which the mutant may change a nested one."""
    return mutant.place.partition(" > ")[0]


def judged(verdicts: Sequence[Verdict], known: Collection[str]) -> tuple[float, list[str]]:
    """The share that is killed or backed, without accepted survivors; and the survivors that nothing explains.

    ``known``: the mutants that docs/internals/mutants.md gives a reason for.
    """
    counted = [one for one in verdicts if one.killed or not reason(one.mutant, known)]
    left = sorted(one.mutant for one in counted if not (one.killed or one.backed))
    return 1 - len(left) / max(1, len(counted)), left


def reason(mutant: str, known: Collection[str]) -> str:
    """Which of the known mutants gives the reason why this one survives: itself, or the one that leaves out all of the
    kind; "" where none does.
    """
    place, _, rest = mutant.partition(": ")
    mode, _, what = rest.partition(" ")
    named = (mutant, f"{place}: {WHOLE.get(mode, mode)} {what}")
    return next((one for one in named if one in known), "")


@functools.cache
def explained() -> frozenset[str]:
    """The mutants that docs/internals/mutants.md gives a reason for."""
    return frozenset(EXPLAINED.findall((ROOT / "docs/internals/mutants.md").read_text()))


def row(first: str, *cells: object) -> str:
    """A line of the table."""
    return f"{first:<12}" + "".join(f"{cell:>15}" for cell in cells)


def kind(mutant: str) -> str:
    """What a mutant leaves out."""
    return mutant.partition(": ")[2].partition(" ")[0]


def fingerprint() -> str:
    """A hash of all the code that decides a verdict."""
    digest = hashlib.sha256()
    for folder in SOURCES:
        for path in sorted((ROOT / folder).rglob("*.py")):
            digest.update(str(path.relative_to(ROOT)).encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def read_cache(path: Path) -> Any:
    return json.loads(path.read_text()) if path.exists() else {}


def write_cache(path: Path, content: str, catalogue: Catalogue, known: dict[str, Verdict]) -> None:
    """Write the cache.

    Verdicts on former code are kept: what killed a mutant then is tried first.
    """
    path.parent.mkdir(exist_ok=True)
    verdicts = {name: asdict(one) for name, one in known.items()}
    path.write_text(json.dumps({"content": content, "catalogue": catalogue.as_json(), "verdicts": verdicts}))


def main(args: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/mutate",
        description="Generate mutants of the code, and look for the test or schedule that kills each.",
    )
    parser.add_argument(
        "--sample",
        type=int,
        default=0,
        metavar="N",
        help="run N of the mutants that change a result (default: all); fail if others with the same labels change"
        " none, and docs/internals/mutants.md does not explain them",
    )
    parser.add_argument("--seed", type=int, default=1, metavar="S", help="the seed of the sample (default 1)")
    parser.add_argument(
        "--only", nargs="*", default=[""], metavar="TEXT", help="run mutants whose text, as --list prints it, starts so"
    )
    parser.add_argument("--kinds", nargs="*", default=KINDS, choices=KINDS, help="kinds of mutants (default: all)")
    parser.add_argument("--list", action="store_true", help="list the mutants, and run none")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: one per processor)")
    parser.add_argument(
        "--schedules", type=int, default=400, metavar="N", help="simulator schedules to record (default 400)"
    )
    parser.add_argument(
        "--lives", type=int, default=200, metavar="N", help="random transaction sequences to record (default 200)"
    )
    parser.add_argument("--first", type=int, default=1, metavar="SEED", help="seed of the first schedule (default 1)")
    parser.add_argument(
        "--kept", action="store_true", help="reuse the places that an earlier run found, although the code has changed"
    )
    parser.add_argument(
        "--held", type=int, default=4, metavar="N", help="requests of each label that schedules delay (default 4)"
    )
    parser.add_argument(
        "--tries",
        type=int,
        default=0,
        metavar="N",
        help="places of each layer in which a mutant is run before it counts as a survivor (default 15 to 200)",
    )
    parser.add_argument("--again", action="store_true", help="run survivors again, even if no code has changed")
    parser.add_argument(
        "--least",
        type=float,
        default=0.95,
        help="share of a sample that must be killed or backed (default 0.95); without --sample, each mutant must be, "
        "unless docs/internals/mutants.md explains it",
    )
    parser.add_argument("--verbose", action="store_true", help="print what killed each mutant")
    wanted = parser.parse_args(args)
    out = os.fdopen(os.dup(1), "w")
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    plugin = MutationRun(wanted, out)
    os.chdir(ROOT)
    folders = list(FOLDERS)
    if wanted.sample:
        files = sorted(Path("tests/unit").rglob("*.py"))
        folders = [str(path) for path in files if ON_THE_STORE.search(path.read_text())]
    options = ["-q", "-s", "-p", "no:cacheprovider", "-p", "no:xdist", "-o", "timeout=0", "--hypothesis-seed=0"]
    code = pytest.main([*options, *folders], plugins=[plugin])
    return plugin.code if code in (0, 5) else int(code)


if __name__ == "__main__":
    sys.exit(main())
