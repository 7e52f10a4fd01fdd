"""What the scripts beside this one check: each failure is a line, and `failures` has all."""

failures = []


def check(condition, what):
    if not condition:
        failures.append(what)
        print(f"FAILED {what}")
