// A hub as one would write it in an afternoon, on the `ws` package: node relay.mjs PORT
// It speaks the part of the hub's protocol that the load needs. Nothing is checked, limited, stored or resumed.
import { randomUUID } from "node:crypto"
import { WebSocketServer } from "ws"

const HUB = "@(cloudflare/signal-hub)"
const actors = new Map()
const topics = new Map()

const envelope = (more) => ({
  id: randomUUID(), from: HUB, to: "", type: "", payload: {}, pattern: "tell", correlationId: null,
  timestamp: Date.now(), metadata: {}, ttl: null, signature: null, ...more,
})
const answer = (socket, request, type, payload) =>
  socket.send(JSON.stringify(envelope({ to: request.from, type, payload, correlationId: request.id })))

const handlers = {
  "hub:connect": (socket, request) => {
    socket.identity = request.from
    answer(socket, request, "hub:connected", { sessionId: randomUUID() })
  },
  "hub:register": (socket, request) => {
    actors.set(request.payload.actorAddress, socket)
    answer(socket, request, "hub:registered", { actorAddress: request.payload.actorAddress })
  },
  "hub:subscribe": (socket, request) => {
    const { topic } = request.payload
    if (!topics.has(topic)) topics.set(topic, new Set())
    topics.get(topic).add(socket)
    answer(socket, request, "hub:subscribed", { topic })
  },
  "hub:send": (socket, request) => {
    const { to, type, data } = request.payload
    actors.get(to)?.send(JSON.stringify(envelope({ from: socket.identity, to, type, payload: data })))
  },
  "hub:broadcast": (socket, request) => {
    const { type, data } = request.payload
    const frame = JSON.stringify(envelope({ from: socket.identity, type, payload: data }))
    for (const actor of actors.values()) if (actor !== socket) actor.send(frame)
    answer(socket, request, "hub:broadcast_ack", { total: actors.size })
  },
  "hub:publish": (socket, request) => {
    const { topic, type, data } = request.payload
    const frame = JSON.stringify(envelope({ from: socket.identity, type, payload: data }))
    for (const subscriber of topics.get(topic) ?? []) subscriber.send(frame)
    answer(socket, request, "hub:published", { topic })
  },
}

const server = new WebSocketServer({ host: "127.0.0.1", port: Number(process.argv[2]), perMessageDeflate: false })
server.on("connection", (socket) => {
  socket.on("message", (text) => {
    const request = JSON.parse(text)
    handlers[request.type]?.(socket, request)
  })
  socket.on("close", () => {
    for (const [address, known] of actors) if (known === socket) actors.delete(address)
    for (const subscribers of topics.values()) subscribers.delete(socket)
  })
})
process.on("SIGTERM", () => process.exit(0))
