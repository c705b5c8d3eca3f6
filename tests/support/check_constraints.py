"""CHECK constraints like those in public schemas of shops, clinics, ledgers, logs and registers."""

from __future__ import annotations

from pathlib import Path

COLUMNS = (
    "id bigint, amount decimal(12,2), price double, quantity int, discount decimal(5,2), rate float, score int, "
    "email string, name string, code string, status string, country string, currency string, phone string, zip string, "
    "url string, payload string, note string, `order` int, `user` string, `weird name` int, iban string, slug string, "
    "active boolean, deleted boolean, deleted_at timestamp, created timestamp, updated timestamp, born date, "
    "start_date date, end_date date, month int, day int, year int, tags array<string>, numbers array<int>, "
    "attributes map<string,string>, address struct<city: string, zip: string, lat: double, lon: double>, "
    "items array<struct<sku: string, price: decimal(10,2), quantity: int>>, ip string, uuid_text string, "
    "hash_text string, raw binary, parent_id bigint, low int, high int, "
    "total decimal(12,2), tax decimal(12,2), lat double, lon double"
)
_LINES = Path(__file__).with_suffix(".sql").read_text().splitlines()
CONSTRAINTS = tuple(line for line in _LINES if not line.startswith("--"))
CLOCK = ("born < current_date()", "created <= now()")
"""Constraints that are rejected because they depend on the current time."""
