"""The child: it runs the code of behaviors and owns the JVM."""
