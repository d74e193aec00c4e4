// Streams one answer from running services, with nothing of Headrace but its protos:
//
//     npm ci
//     node client.js 127.0.0.1:50051 "What is a headrace?"

import path from "node:path";
import { fileURLToPath } from "node:url";

import grpc from "@grpc/grpc-js";
import protoLoader from "@grpc/proto-loader";

const PROTOS = path.resolve(path.dirname(fileURLToPath(import.meta.url)), "../../protos");
const DEADLINE_MS = 300_000;

const [target, question] = process.argv.slice(2);
if (!question) {
  console.error('usage: node client.js HOST:PORT "QUESTION"');
  process.exit(2);
}

// 64-bit numbers, as the seed is, do not fit into a JavaScript number: they come as text.
const options = { includeDirs: [PROTOS], longs: String, enums: String };
const definition = protoLoader.loadSync("headrace/v1/decode.proto", options);
const { DecodeService } = grpc.loadPackageDefinition(definition).headrace.v1;
const client = new DecodeService(target, grpc.credentials.createInsecure());

const call = client.generate(
  {
    prompt: { chat: { messages: [{ role: "user", content: question }] } },
    sampling: { temperature: 0 },
    stopping: { maxTokens: 128 },
  },
  { deadline: Date.now() + DEADLINE_MS },
);

// Each event has one of header, chunk and result.
call.on("data", ({ chunk, result }) => {
  if (chunk) process.stdout.write(chunk.text);
  if (result) {
    const { promptTokens, completionTokens, passes } = result.usage;
    console.log(`\n${promptTokens} prompt tokens, ${completionTokens} generated in ${passes} passes (${result.finishReason})`);
  }
});
call.on("error", (error) => {
  console.error(`${grpc.status[error.code]}: ${error.details}`);
  process.exitCode = 1;
});
call.on("end", () => client.close());
