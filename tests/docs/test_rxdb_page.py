"""The programs of the page about RxDB, run as they are printed."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from support.calls import Caller
from support.node import HERE
from support.server import ServerProcess

ROOT = Path(__file__).resolve().parents[2]
PRINTED = "127.0.0.1:4437"
OVER_HTTP = """
import { createRxDatabase } from "rxdb/plugins/core"
import { getRxStorageMemory } from "rxdb/plugins/storage-memory"
import { replicateOverHttp } from "./http.mjs"

const properties = { id: { type: "string", maxLength: 64 } }
const schema = { version: 0, primaryKey: "id", type: "object", properties }
const database = await createRxDatabase({ name: "other", storage: getRxStorageMemory() })
await database.addCollections({ todos: { schema } })
const replication = replicateOverHttp(database.todos)
await replication.awaitInitialReplication()
await database.todos.insert({ id: "t-2" })
await replication.awaitInSync()
for (const todo of await database.todos.find().exec()) console.log(todo.id)
await database.close()
"""


def _run(directory: Path, script: str) -> str:
    done = subprocess.run(
        ["node", script], cwd=directory, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_programs_of_the_page(server: ServerProcess, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "rxdb.md").read_text(encoding="utf-8")
    programs = dict(re.findall(r"^```js (\S+)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL))
    assert set(programs) == {"todos.mjs", "http.mjs"}
    (tmp_path / "node_modules").symlink_to(HERE / "node_modules")
    for name, text in {**programs, "other.mjs": OVER_HTTP}.items():
        assert name == "other.mjs" or PRINTED in text
        (tmp_path / name).write_text(text.replace(PRINTED, f"127.0.0.1:{server.port}"), encoding="utf-8")
    assert _run(tmp_path, "todos.mjs") == "t-1 write it down\n"
    found = Caller(server)("GET", "/v1/databases/default/docs/todos/t-1").body
    assert found["data"] == {"text": "write it down", "done": False}
    assert _run(tmp_path, "other.mjs") == "t-1\nt-2\n"
    assert Caller(server)("GET", "/v1/databases/default/docs/todos/t-2").status == 200
