/** The prompt and the sampling parameters. */

import { ROLES, type Message } from "../state/page";
import { usePage } from "../state/hooks";
import { Choice, NumberField, TextArea } from "./parts";

const KINDS = [
  ["plain", "Plain text"],
  ["chat", "Chat"],
] as const;

export function PromptPanel() {
  const { state, change, capabilities } = usePage();
  const { sampling } = state;
  const sample = (part: Partial<typeof sampling>) => change({ sampling: { ...sampling, ...part } });
  return (
    <section class="panel" aria-labelledby="prompt-title">
      <h2 id="prompt-title">Input</h2>
      <div class="segments" role="group" aria-label="Prompt format">
        {KINDS.map(([kind, label]) => (
          <button
            key={kind}
            type="button"
            aria-pressed={state.kind === kind}
            onClick={() => change({ kind })}
          >
            {label}
          </button>
        ))}
      </div>
      {state.kind === "plain" ? (
        <TextArea label="Prompt" value={state.prompt} onChange={(prompt) => change({ prompt })} />
      ) : (
        <Conversation messages={state.messages} onChange={(messages) => change({ messages })} />
      )}
      <div class="fields">
        <NumberField
          label="Max tokens"
          value={sampling.maxTokens}
          min={1}
          max={capabilities.sizes.max_model_len}
          step={1}
          onChange={(maxTokens) => sample({ maxTokens })}
        />
        <NumberField
          label="Temperature"
          value={sampling.temperature}
          min={0}
          max={2}
          step={0.1}
          onChange={(temperature) => sample({ temperature })}
        />
        <NumberField
          label="Top p"
          value={sampling.topP}
          min={0.01}
          max={1}
          step={0.01}
          onChange={(topP) => sample({ topP })}
        />
        <NumberField label="Seed" value={sampling.seed} step={1} onChange={(seed) => sample({ seed })} />
      </div>
    </section>
  );
}

function Conversation(props: { messages: Message[]; onChange: (messages: Message[]) => void }) {
  const { messages, onChange } = props;
  const set = (index: number, part: Partial<Message>) =>
    onChange(messages.map((message, each) => (each === index ? { ...message, ...part } : message)));
  const add = () => {
    const role = messages.at(-1)?.role === "user" ? "assistant" : "user";
    onChange([...messages, { role, content: "" }]);
  };
  return (
    <div class="conversation">
      {messages.map((message, index) => (
        <div key={index} class="message">
          <Choice
            label={`Message ${index + 1} is from`}
            value={message.role}
            options={ROLES.map((role) => [role, role] as const)}
            onChange={(role) => set(index, { role })}
          />
          <TextArea
            label={`Message ${index + 1}`}
            rows={2}
            value={message.content}
            onChange={(content) => set(index, { content })}
          />
          {messages.length > 1 && (
            <button
              type="button"
              class="quiet"
              aria-label={`Remove message ${index + 1}`}
              onClick={() => onChange(messages.filter((_, each) => each !== index))}
            >
              Remove
            </button>
          )}
        </div>
      ))}
      <button type="button" class="quiet" onClick={add}>
        Add a message
      </button>
    </div>
  );
}
