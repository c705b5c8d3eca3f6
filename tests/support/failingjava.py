"""A Java whose JVMs of Spark are killed while they start."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

from tests.support.needs import need

if TYPE_CHECKING:
    from pathlib import Path

_SCRIPT = """\
#!/bin/bash
# What is not Spark's driver (`java -version`, the launcher) runs unharmed.
case "$*" in
*org.apache.spark.launcher.Main*) exec "{java}" "$@" ;;
*org.apache.spark.deploy.SparkSubmit*) ;;
*) exec "{java}" "$@" ;;
esac
[ -s "{left}" ] || exec "{java}" "$@"
read -r count < "{left}"
if [ "$count" -gt 1 ]; then echo $((count - 1)) > "{left}"; else : > "{left}"; fi
find "{work}" -name 'blockmgr-*' -exec rm -r {{}} + 2>/dev/null
# Without processes of its own: the loop runs a hundred times a second while the JVM starts.
shopt -s globstar nullglob
exec {{pause}}<> <(:)
made() {{ local folders=("{work}"/**/blockmgr-*); [ "${{#folders[@]}}" -gt 0 ]; }}
# In the background bash would give it no standard input, by whose end a JVM of PySpark ends.
"{java}" "$@" <&0 &
while kill -0 $!; do
    # PySpark removes the folder of the file as soon as it has read it.
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

    It concerns sessions below ``work``. A JVM is killed once PySpark knows its address (``connecting``), or while it
    makes the SparkContext, when PySpark has a gateway already. With the ``signal`` STOP it hangs instead.
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
        """How many were killed by now."""
        return len(self._killed.read_text().splitlines()) if self._killed.exists() else 0

    def mend(self) -> None:
        """Kill no more of them."""
        self._left.write_text("")
