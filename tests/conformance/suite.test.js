// The public suite, unchanged. It lives in a file of ours because vitest does not look for tests in node_modules.
import { runConformanceTests } from "@durable-streams/server-conformance-tests"

runConformanceTests({ baseUrl: process.env.TAILRACE_TEST_URL, subscriptions: true })
