"""The catalogs of Spark that an executor uses, and the setting ``trusted-spark-catalogs``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from distop.errors import InvalidArgument
from distop.protocol.records import TableRecord
from distop.settings import Settings, executor_config
from distop.settings_file import SettingsFile
from distop.tables import check_reachable, folders_of, place_of, plan_table
from distop.tables.spark.spark_catalog import check_catalog
from distop.worker.child_side.environment import Environment
from distop_behaviors.apply import file_rewrite

ICEBERG = "org.apache.iceberg.spark.SparkCatalog"
OF_SESSION = "org.apache.iceberg.spark.SparkSessionCatalog"
REST = "org.apache.iceberg.rest.RESTCatalog"


class Asked(Exception):
    """Spark would create a catalog here, and a REST catalog would ask its server."""


class Session:
    """A stand-in for the session and its JVM, up to where Spark creates a catalog."""

    def __init__(self, settings: dict[str, str], trusted: str = "") -> None:
        self.settings = {"spark.app.name": "x", "spark.distop.trustedCatalogs": trusted, **settings}
        self.parts: list[str] = []

    def __getattr__(self, name: str) -> Session:
        return self

    def __call__(self, *_: Any) -> Session:
        return self

    def getAllConfs(self) -> dict[str, str]:
        return self.settings

    def writeValueAsString(self, value: Any) -> str:
        return json.dumps(value)

    def set(self, name: str, value: str) -> None:
        self.settings[name] = value

    def parseMultipartIdentifier(self, name: str) -> Session:
        self.parts = [part.strip("`") for part in name.split(".")]
        return self

    def size(self) -> int:
        return len(self.parts)

    def apply(self, n: int) -> str:
        return self.parts[n]

    def catalog(self, name: str) -> Any:
        raise Asked(name)


def options(name: str, made_by: str, **fields: str) -> dict[str, str]:
    prefix = f"spark.sql.catalog.{name}"
    return {prefix: made_by, **{f"{prefix}.{key.replace('_', '-')}": value for key, value in fields.items()}}


REFUSED = [
    ("lake", options("lake", ICEBERG, type="rest", uri="https://x"), "its server (type 'rest')"),
    ("lake", options("lake", ICEBERG, type="REST"), "its server (type 'REST')"),
    ("lake", options("lake", ICEBERG, TYPE="rest"), "its server (type 'rest')"),
    ("lake", options("lake", ICEBERG, type="hadoop", Type="rest"), "its server (type 'rest')"),
    ("lake", options("lake", ICEBERG, type="glue"), "its server (type 'glue')"),
    ("lake", options("lake", ICEBERG, type="jdbc"), "its server (type 'jdbc')"),
    ("lake", options("lake", ICEBERG, type=""), "its server (type '')"),
    ("lake", options("lake", ICEBERG, catalog_impl=REST), f"its implementation '{REST}', which is not known,"),
    ("lake", options("lake", ICEBERG, type="hadoop", Catalog_Impl="a.B"), "its implementation 'a.B', which"),
    ("lake", options("lake", "io.unitycatalog.spark.UCSingleCatalog"), "'io.unitycatalog.spark.UCSingle"),
    ("lake", options("lake", f"{ICEBERG}s", type="hadoop"), "spark.SparkCatalogs', which"),
    ("lake", options("lake", "", type="hadoop"), "its implementation '', which is not known,"),
    ("lake", options("lake", "builtin"), "its implementation 'builtin', which is not known,"),
    ("spark_catalog", options("spark_catalog", OF_SESSION, type="rest"), "its server (type 'rest')"),
    ("spark_catalog", options("spark_catalog", "org.apache.spark.sql.delta.catalog.DeltaCatalog"), "DeltaCatalog"),
]
ASKED: list[tuple[str, dict[str, str]]] = [
    ("lake", options("lake", ICEBERG, type="hadoop", warehouse="/w")),
    ("lake", options("lake", ICEBERG, Type="HIVE", uri="thrift://m:9083")),
    ("lake", options("lake", ICEBERG)),
    ("lake", options("lake", ICEBERG, type="hadoop") | options("other", ICEBERG, type="rest")),
    ("lake", options("lake", ICEBERG, type="hadoop") | options("lake-2", ICEBERG, type="rest")),
    ("lake", {}),
    ("spark_catalog", {}),
    ("spark_catalog", options("spark_catalog", "builtin")),
    ("spark_catalog", options("spark_catalog", OF_SESSION)),
    ("spark_catalog", options("spark_catalog", OF_SESSION, type="hive")),
    ("spark_catalog", options("spark_catalog", OF_SESSION, type="hadoop", warehouse="/w")),
]
WAYS: dict[str, Any] = {
    "plan": lambda table, session: plan_table(table, spark=lambda: session),
    "place": lambda table, session: place_of(table, spark=lambda: session),
    "folders": lambda table, session: folders_of(table, spark=lambda: session, elsewhere=True),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("catalog", "settings", "why"), REFUSED)
def test_hole_2_a_catalog_of_spark_whose_server_chooses_code_and_hosts_is_not_asked(
    catalog: str, settings: dict[str, str], why: str, way: str
) -> None:
    names = [f"{catalog}.db.t", f"`{catalog}`.db.t"]
    if catalog == "spark_catalog":
        names += ["db.t", "SPARK_Catalog.db.t"]
    for location in names:
        table = TableRecord("t", "spark", location)
        with pytest.raises(InvalidArgument) as refused:
            WAYS[way](table, Session(settings, trusted="Lake,other"))
        message = str(refused.value)
        assert f"Spark's catalog '{catalog}' is refused: " in message
        assert why in message
        assert "may choose classes, hosts and where credentials are sent" in message
        assert "--format iceberg --option catalog=" in message
        assert f"list {catalog} in the executors' setting trusted-spark-catalogs" in message
        assert "\n" not in message
        with pytest.raises(Asked):
            WAYS[way](table, Session(settings, trusted=f"other,{catalog}"))


def test_hole_2_the_check_that_a_table_is_reachable_asks_no_refused_catalog() -> None:
    catalog, settings, _ = REFUSED[0]
    check_reachable(TableRecord("t", "spark", f"{catalog}.db.t"), lambda: Session(settings))


@pytest.mark.parametrize(("catalog", "settings"), ASKED)
def test_a_catalog_of_spark_that_cannot_give_settings_is_asked(catalog: str, settings: dict[str, str]) -> None:
    for location in (f"{catalog}.db.t", *(["db.t", "Spark_Catalog.db.t"] if catalog == "spark_catalog" else [])):
        with pytest.raises(Asked):
            plan_table(TableRecord("t", "spark", location), spark=lambda: Session(settings))


def test_hole_2_the_catalog_that_data_files_are_written_through_is_checked_too() -> None:
    """``apply`` sets the type; other options come from the executor's settings."""
    settings = options("default_iceberg", "x.Y", type="rest", uri="https://x", catalog_impl=REST)
    session = Session(settings)
    with pytest.raises(InvalidArgument, match=r"Spark's catalog 'default_iceberg' is refused: .*RESTCatalog"):
        file_rewrite._write(session, "/s", [], {"fields": []}, [], "/t")
    del session.settings["spark.sql.catalog.default_iceberg.catalog-impl"]
    check_catalog(session, "default_iceberg")
    assert session.settings["spark.sql.catalog.default_iceberg.type"] == "hadoop"


def trusted(file: SettingsFile | None = None, env: dict[str, str] | None = None, **flags: Any) -> tuple[str, ...]:
    settings = Settings(flags, env or {}, **({"file": file} if file is not None else {}))
    return executor_config(settings, {}).trusted_spark_catalogs


def test_the_list_comes_from_a_flag_a_variable_or_the_file() -> None:
    assert trusted() == ()
    variables = {"DISTOP_TRUSTED_SPARK_CATALOGS": "lake, lake-2,lake"}
    assert trusted(env=variables) == ("lake", "lake-2")
    file = SettingsFile(Path("distop.toml"), {"trusted-spark-catalogs": ["one", "two"]})
    assert trusted(file) == ("one", "two")
    assert trusted(file, variables) == ("lake", "lake-2")
    assert trusted(file, variables, trusted_spark_catalogs="flag,Spark_Catalog") == ("flag", "Spark_Catalog")


@pytest.mark.parametrize("text", ["", "a,,b", "a.b", "*", "lake.*", "a b", "ä"])
def test_an_invalid_name_of_a_catalog_is_refused_in_one_sentence(text: str) -> None:
    with pytest.raises(InvalidArgument, match=r"^--trusted-spark-catalogs") as refused:
        trusted(trusted_spark_catalogs=text)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("listed", [[], ["lake", "Spark_Catalog"]])
def test_the_list_reaches_the_child_s_session_and_no_setting_of_spark_replaces_it(
    listed: list[str], tmp_path: Path
) -> None:
    config = {
        "shared_dir": "", "verifier_urls": [], "space": "", "executor": "e1", "spark_master": "local[1]", "ttl": 10.0,
        "serves": {}, "behaviors": {}, "trusted_spark_catalogs": listed,
        "spark_conf": {"spark.distop.trustedCatalogs": "evil"},
    }  # fmt: skip
    found = Environment(config, tmp_path, None).spark._settings  # type: ignore[arg-type]
    session = Session({**options("lake", ICEBERG, type="rest"), **options("spark_catalog", "x.Y"), **found})
    for name in ("lake", "spark_catalog"):
        if listed:
            check_catalog(session, name)
        else:
            with pytest.raises(InvalidArgument):
                check_catalog(session, name)
    with pytest.raises(InvalidArgument):
        check_catalog(Session({**options("evil", ICEBERG, type="rest"), **found}), "evil")
