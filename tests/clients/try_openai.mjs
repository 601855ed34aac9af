// openai from npm: `node try_openai.mjs URL`; prints one line of JSON.
import OpenAI from "openai";

const api = new OpenAI({ baseURL: process.argv[2], apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "hello 😀 world" }];
const whole = await api.chat.completions.create({ model: "echo", messages });
const stream = await api.chat.completions.create({
  model: "echo", messages, n: 2, stream: true, stream_options: { include_usage: true },
});
const streamed = ["", ""];
let usage = null;
for await (const chunk of stream) {
  for (const choice of chunk.choices) streamed[choice.index] += choice.delta.content ?? "";
  if (chunk.usage) usage = chunk.usage.completion_tokens;
}
const call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>';
const runner = api.chat.completions.stream({
  model: "echo",
  messages: [{ role: "user", content: call }],
  tools: [{ type: "function", function: { name: "weather", parameters: { type: "object" } } }],
});
const { message, finish_reason } = (await runner.finalChatCompletion()).choices[0];
let error = null;
try {
  await api.chat.completions.create({ model: "echo", messages, temperature: 3 });
} catch (refused) {
  error = [refused.status, refused.param];
}
const left = await api.chat.completions.create({ model: "echo", messages, stream: true });
for await (const _ of left) break;
console.log(JSON.stringify({
  whole: whole.choices[0].message.content, streamed, usage, error, reason: finish_reason,
  call: message.tool_calls[0].function, models: (await api.models.list()).data.map((m) => m.id),
}));
