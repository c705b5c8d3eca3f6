"""A Java installation that kills JVMs of Spark while they start."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

from tests.support.needs import need

if TYPE_CHECKING:
    from pathlib import Path

_SCRIPT = """\
#!/bin/bash
# All programs other than Spark's driver (`java -version`, the launcher) run normally.
case "$*" in
*org.apache.spark.launcher.Main*) exec "{java}" "$@" ;;
*org.apache.spark.deploy.SparkSubmit*) ;;
*) exec "{java}" "$@" ;;
esac
[ -s "{left}" ] || exec "{java}" "$@"
read -r count < "{left}"
if [ "$count" -gt 1 ]; then echo $((count - 1)) > "{left}"; else : > "{left}"; fi
find "{work}" -name 'blockmgr-*' -exec rm -r {{}} + 2>/dev/null
# This starts no processes: the loop runs a hundred times per second while the JVM starts.
shopt -s globstar nullglob
exec {{pause}}<> <(:)
made() {{ local folders=("{work}"/**/blockmgr-*); [ "${{#folders[@]}}" -gt 0 ]; }}
# Background jobs of bash have no standard input, but a JVM of PySpark ends at the end of its standard input.
"{java}" "$@" <&0 &
while kill -0 $!; do
    # PySpark removes the folder of this file as soon as it has read the file.
    moment="{moment}"
    [ -n "$moment" ] && {{ [ -e "$moment" ] || [ ! -e "${{moment%/*}}" ]; }} && break
    [ -z "$moment" ] && made && break
    read -r -t 0.01 -u "$pause"
done
kill -{signal} $!
wait $!
echo killed >> "{killed}"
exit 137
"""


class FailingJava:
    """A ``JAVA_HOME`` that kills the next ``times`` JVMs of Spark sessions.

    Only sessions below ``work`` are affected. ``connecting``: the JVM is killed once PySpark knows its address;
    otherwise while it creates the SparkContext, when PySpark is connected. With the ``signal`` STOP it hangs instead.
    """

    def __init__(self, folder: Path, work: Path, times: int, *, connecting: bool = False, signal: str = "KILL") -> None:
        java = shutil.which("java")
        need(java, "Java 17 or newer: install openjdk-17-jre-headless")
        assert java is not None
        self._left, self._killed = folder / "left", folder / "killed"
        script = folder / "bin" / "java"
        script.parent.mkdir(parents=True)
        moment = "$_PYSPARK_DRIVER_CONN_INFO_PATH" if connecting else ""
        paths = {"java": os.path.realpath(java), "left": self._left, "killed": self._killed, "work": work}
        script.write_text(_SCRIPT.format(moment=moment, signal=signal, **paths))
        script.chmod(0o755)
        self._left.write_text(f"{times}\n")
        self.env = {"JAVA_HOME": str(folder)}

    @property
    def killed(self) -> int:
        """The number of killed JVMs."""
        return len(self._killed.read_text().splitlines()) if self._killed.exists() else 0

    def mend(self) -> None:
        """Stop killing JVMs."""
        self._left.write_text("")
