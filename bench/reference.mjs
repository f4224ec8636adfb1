// Starts the reference server from npm: node reference.mjs PORT [DATA_DIR]; without a directory it keeps all in memory.
import { DurableStreamTestServer } from "@durable-streams/server"

const [port, dataDir] = process.argv.slice(2)
const server = new DurableStreamTestServer({ host: "127.0.0.1", port: Number(port), dataDir })
await server.start()
process.on("SIGTERM", () => server.stop().then(() => process.exit(0)))
