// Writes cases.jsonl from the npm package @bufbuild/cel-spec:
//   npm pack @bufbuild/cel-spec@0.6.1 && tar xzf bufbuild-cel-spec-0.6.1.tgz && node export.mjs package > cases.jsonl
// One line is [suite, name, expression, value as proto3 JSON, null if it is an error, or "bindings"].
import { pathToFileURL } from "node:url"
import { resolve } from "node:path"

const SUITES = "basic comparisons conversions fields fp_math integer_math lists logic macros parse string timestamps"
const path = resolve(process.argv[2], "dist/esm/testdata/conformance.js")
const { tests } = await import(pathToFileURL(path).href)

function* cases(suite, names) {
  for (const { original } of suite.tests ?? []) yield [[...names, original.name].join("/"), original]
  for (const inner of suite.suites ?? []) yield* cases(inner, [...names, inner.name])
}

for (const suite of tests.suites) {
  if (!SUITES.split(" ").includes(suite.name)) continue
  for (const [name, test] of cases(suite, [])) {
    // What has variables, messages or checks of its own is about another environment than ours.
    const own = test.bindings || test.typeEnv || test.container || test.checkOnly || test.disableMacros
    const value = own ? "bindings" : test.evalError || test.anyEvalErrors ? null : (test.value ?? { boolValue: true })
    console.log(JSON.stringify([suite.name, name, test.expr, value]))
  }
}
