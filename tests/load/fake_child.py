"""Stands in for optimize.load.child and does what the file says, to see what the parent makes of it."""

import json
import os
import sys


def main() -> None:
    with open(sys.argv[1]) as file:
        order = file.read()
    if order == "abort":
        os.abort()
    while order == "spin":
        pass
    print(json.dumps({"refused": " ".join(sorted(os.environ)), "hint": ""}))


if __name__ == "__main__":
    main()
