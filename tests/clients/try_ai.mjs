// Vercel's AI SDK: `node try_ai.mjs URL`; prints one line of JSON.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, jsonSchema, streamText, tool } from "ai";

const provider = createOpenAICompatible({
  name: "spec-serve", baseURL: process.argv[2], apiKey: "none", includeUsage: true,
});
const model = provider("echo");
const prompt = "hello 😀 world";
const whole = await generateText({ model, prompt, maxRetries: 0 });
const result = streamText({ model, prompt, maxRetries: 0 });
let streamed = "";
for await (const piece of result.textStream) streamed += piece;
const call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>';
const tools = {
  weather: tool({
    description: "The weather in a city.",
    inputSchema: jsonSchema({ type: "object", properties: { city: { type: "string" } } }),
  }),
};
const calling = streamText({ model, prompt: call, tools, maxRetries: 0 });
await calling.consumeStream();
const [made] = await calling.toolCalls;
console.log(JSON.stringify({
  whole: whole.text, tokens: whole.usage.outputTokens, streamed,
  usage: (await result.usage).outputTokens, reason: await calling.finishReason,
  call: [made.toolName, made.input],
}));
