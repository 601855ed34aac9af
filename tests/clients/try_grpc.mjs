// @grpc/grpc-js, which learns the service by reflection: `node try_grpc.mjs ADDRESS`; JSON.
import * as grpc from "@grpc/grpc-js";
import { GrpcReflection } from "grpc-js-reflection-client";

const address = process.argv[2];
const plain = grpc.credentials.createInsecure();
const reflection = new GrpcReflection(address, plain);
const services = await reflection.listServices();
const descriptor = await reflection.getDescriptorBySymbol("specserve.v1.SpecServe");
const found = descriptor.getPackageObject({ keepCase: true, defaults: false, oneofs: true });
const client = new found.specserve.v1.SpecServe(address, plain);

const told = await new Promise((resolve, reject) => {
  const events = [];
  const call = client.Generate({ prompt: "hello 😀 world" });
  call.on("data", (event) => events.push(event));
  call.on("error", reject);
  call.on("end", () => resolve(events));
});
const refused = await new Promise((resolve) => {
  const call = client.Generate({ prompt: "a", sampling: { temperature: 3 } });
  call.on("data", () => {});
  call.on("error", resolve);
});
const cancelled = await new Promise((resolve) => {
  const call = client.Generate({ prompt: "a", stop: { ignore_eos: true } });
  call.on("data", () => call.cancel());
  call.on("error", (error) => resolve(error.code));
});
console.log(JSON.stringify({
  services,
  text: told.map((event) => event.delta?.text ?? "").join(""),
  first: Object.keys(told[0]).includes("started"),
  tokens: told.at(-1).finished.usage.completion_tokens,
  refused: refused.code, cancelled,
}));
client.close();
