// RxDB clients, unchanged from npm, driven line by line: one JSON command in, one JSON answer out.
//
//   {"do": "open", "client": "a", "kind": "ws" | "http", "url": "...", "collection": "orders"}
//   {"do": "put" | "patch" | "remove", "client": "a", "id": "d1", "data": {...}}
//   {"do": "state" | "settle" | "offline" | "online" | "close", "client": "a"}
import { createInterface } from "node:readline"
import { Subject } from "rxjs"
import { createRxDatabase, defaultConflictHandler } from "rxdb/plugins/core"
import { replicateRxCollection } from "rxdb/plugins/replication"
import { replicateWithWebsocketServer } from "rxdb/plugins/replication-websocket"
import { getRxStorageMemory } from "rxdb/plugins/storage-memory"
import { wrappedValidateAjvStorage } from "rxdb/plugins/validate-ajv"

const clients = new Map()
const schema = {
  version: 0,
  primaryKey: "id",
  type: "object",
  properties: { id: { type: "string", maxLength: 64 }, n: { type: "number" }, text: { type: "string" } },
  required: ["id"],
}

/** What a page shows: the pull handler, the push handler and the event source of RxDB's HTTP example. */
function overHttp(client) {
  const changes = new Subject()
  const base = client.url
  let source = null
  const self = crypto.randomUUID() // by which the server knows whose writes not to send back
  let last = "" // where the stream goes on, as an EventSource remembers it
  const follow = async () => {
    while (client.following) {
      source = new AbortController()
      try {
        const headers = last ? { "Last-Event-ID": last } : {}
        const answer = await fetch(`${base}/stream?collection=${client.name}&client=${self}`, { signal: source.signal, headers })
        if (!answer.ok) throw new Error(`stream: ${answer.status}`)
        if (!last) changes.next("RESYNC") // whatever happened before anybody listened
        let text = ""
        for await (const chunk of answer.body.pipeThrough(new TextDecoderStream())) {
          text += chunk
          for (let end = text.indexOf("\n\n"); end >= 0; end = text.indexOf("\n\n")) {
            const lines = text.slice(0, end).split("\n")
            const data = lines.find((line) => line.startsWith("data: "))
            const id = lines.find((line) => line.startsWith("id:"))
            text = text.slice(end + 2)
            if (id) last = id.slice(3).trim()
            if (data) changes.next(JSON.parse(data.slice(6)))
          }
        }
      } catch (error) {
        client.lastError = String(error)
      }
      await new Promise((resolve) => setTimeout(resolve, 100))
    }
  }
  const checked = async (answer) => {
    if (!answer.ok) throw new Error(`${answer.status}: ${await answer.text()}`)
    return answer.json()
  }
  client.stopFollowing = () => {
    client.following = false
    source?.abort()
  }
  client.startFollowing = () => {
    client.following = true
    follow()
  }
  client.startFollowing()
  return replicateRxCollection({
    collection: client.collection,
    replicationIdentifier: `http-${client.url}`,
    live: true,
    retryTime: 200,
    pull: {
      batchSize: client.batch,
      stream$: changes.asObservable(),
      async handler(checkpoint, limit) {
        const query = new URLSearchParams({ collection: client.name, limit })
        if (checkpoint) query.set("checkpoint", JSON.stringify(checkpoint))
        return checked(await fetch(`${base}/pull?${query}`))
      },
    },
    push: {
      batchSize: client.batch,
      async handler(rows) {
        client.pushes += rows.length
        const found = await checked(
          await fetch(`${base}/push`, {
            method: "POST",
            headers: { "Content-Type": "application/json" },
            body: JSON.stringify({ client: self, collection: client.name, rows }),
          }),
        )
        client.conflicts += found.conflicts.length
        return found.conflicts
      },
    },
  })
}

async function replicate(client) {
  client.replication =
    client.kind === "http"
      ? overHttp(client)
      : await replicateWithWebsocketServer({
          collection: client.collection,
          replicationIdentifier: `ws-${client.url}`,
          url: client.url,
          batchSize: client.batch,
          live: true,
          headers: client.headers,
        })
  client.replication.error$.subscribe((error) => {
    client.errors += 1
    client.lastError = String(error?.message ?? error)
  })
}

const actions = {
  async open({ client: key, kind, url, collection, batch = 10, headers, strict = false }) {
    const memory = getRxStorageMemory()
    const storage = strict ? wrappedValidateAjvStorage({ storage: memory }) : memory
    const database = await createRxDatabase({ name: `${key}-${process.pid}`, storage })
    const resolved = []
    const conflictHandler = {
      isEqual: defaultConflictHandler.isEqual,
      resolve(input, context) {
        resolved.push(input.realMasterState.id)
        return defaultConflictHandler.resolve(input, context)
      },
    }
    await database.addCollections({ [collection]: { schema, conflictHandler } })
    const client = { kind, url, name: collection, batch, headers, database, resolved, pushes: 0, conflicts: 0, errors: 0 }
    client.collection = database[collection]
    clients.set(key, client)
    await replicate(client)
    return {}
  },
  async put({ client: key, id, data }) {
    await clients.get(key).collection.upsert({ id, ...data })
    return {}
  },
  async patch({ client: key, id, data }) {
    const found = await clients.get(key).collection.findOne(id).exec()
    if (found) await found.incrementalPatch(data)
    return { found: Boolean(found) }
  },
  async remove({ client: key, id }) {
    const found = await clients.get(key).collection.findOne(id).exec()
    if (found) await found.incrementalRemove()
    return { found: Boolean(found) }
  },
  async state({ client: key }) {
    const client = clients.get(key)
    const documents = await client.collection.find().exec()
    return {
      documents: Object.fromEntries(documents.map((one) => [one.id, plain(one.toJSON())])),
      conflicts: client.resolved.length,
      errors: client.errors,
      lastError: client.lastError ?? null,
    }
  },
  async settle({ client: key }) {
    await clients.get(key).replication.awaitInSync()
    return {}
  },
  async offline({ client: key }) {
    const client = clients.get(key)
    client.stopFollowing?.()
    await client.replication.cancel()
    if (client.kind === "ws") await new Promise((resolve) => setTimeout(resolve, 0))
    return {}
  },
  async online({ client: key }) {
    await replicate(clients.get(key))
    return {}
  },
  async close({ client: key }) {
    const client = clients.get(key)
    client.stopFollowing?.()
    await client.database.close()
    clients.delete(key)
    return {}
  },
}

/** What people wrote: without what the server and RxDB put beside it. */
function plain(document) {
  const { id, n, text, _deleted } = document
  return { id, n, text, _deleted: Boolean(_deleted) }
}

// The plugin prints what it likes; an answer has a mark.
const answer = (value) => process.stdout.write(`=> ${JSON.stringify(value)}\n`)

for await (const line of createInterface({ input: process.stdin })) {
  const command = JSON.parse(line)
  try {
    answer({ ok: await actions[command.do](command) })
  } catch (error) {
    answer({ error: String(error?.stack ?? error) })
  }
}
process.exit(0)
