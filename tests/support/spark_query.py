"""A streaming query in a process of its own: from one stream into another, until it is killed.

    python spark_query.py <endpoint> <source> <target> <directory> [once]

Prints `running` and where our package is when batches begin, and `done` at the end of a bounded run.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import tailrace
from support.spark import open_session


def main(endpoint: str, source: str, target: str, directory: str, once: str = "") -> None:
    place = Path(directory)
    spark = open_session(place / "spark")
    frame = (
        spark.readStream.format("tailrace")
        .options(endpoint=endpoint, stream=source, startingOffsets="earliest", maxOffsetsPerTrigger="40")
        .option("sealedEntriesMin", "1")
        .load()
        # Other partitions on every attempt, so that only what was staged can be right.
        .select("value")
        .repartition(random.choice([1, 2, 3]))
    )
    writer = (
        frame.writeStream.format("tailrace")
        .options(endpoint=endpoint, stream=target, batchRows="7")
        .option("checkpointLocation", str(place / "checkpoint"))
    )
    query = (writer.trigger(availableNow=True) if once else writer).start()
    print("running", tailrace.__file__, flush=True)
    query.awaitTermination()
    print("done", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
