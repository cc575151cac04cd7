/** A vector made from two lists of prompts. */

import { useState } from "preact/hooks";

import { stream } from "../api/client";
import type { TrainingEvent, Vector } from "../api/types";
import { usePage, useRun } from "../state/hooks";
import { Chart } from "./chart";
import { Choice, RunBar, TextArea, TextField } from "./parts";

const METHODS = [
  ["mean_difference", "mean difference"],
  ["pca", "PCA of the pairs"],
  ["logistic", "logistic regression"],
] as const;

const POSITIONS = [
  ["-1", "last token"],
  ["mean", "mean, without the first token"],
] as const;

const STAGES = { capture: "Reading prompts", fit: "Fitting layers" };

const POSITIVE = `I love this, it is wonderful and I am so happy.
What a beautiful day, everything is perfect!
This film is a masterpiece, I enjoyed every minute.
The food was delicious and the people were kind.`;
const NEGATIVE = `I hate this, it is horrible and I am so angry.
What an awful day, everything is ruined!
This film is a disaster, I suffered every minute.
The food was disgusting and the people were rude.`;

export function Training(props: { onMade: (vector: Vector) => void }) {
  const { reloadStored } = usePage();
  const run = useRun();
  const [name, setName] = useState("joy");
  const [positive, setPositive] = useState(POSITIVE);
  const [negative, setNegative] = useState(NEGATIVE);
  const [method, setMethod] = useState<(typeof METHODS)[number][0]>("mean_difference");
  const [position, setPosition] = useState<(typeof POSITIONS)[number][0]>("mean");
  const [progress, setProgress] = useState("");
  const [made, setMade] = useState<Vector | null>(null);
  const train = () =>
    run.start(async (signal) => {
      setMade(null);
      const body = {
        name,
        method,
        position: position === "mean" ? position : Number(position),
        positive: lines(positive),
        negative: lines(negative),
      };
      try {
        for await (const event of stream<TrainingEvent>({ path: "/v1/vectors/train", body }, signal)) {
          if (event.stage) setProgress(`${STAGES[event.stage]}: ${event.done} of ${event.total}`);
          if (!event.vector) continue;
          setMade(event.vector);
          await reloadStored();
          props.onMade(event.vector);
        }
      } finally {
        setProgress("");
      }
    });
  return (
    <details class="training">
      <summary>Train a vector from two lists of prompts</summary>
      <TextField label="Name" value={name} hint="lower-case letters, digits and . _ -" onChange={setName} />
      <Choice label="Position" value={position} options={POSITIONS} onChange={setPosition} />
      <Choice label="Method" value={method} options={METHODS} onChange={setMethod} />
      <TextArea
        label="Positive prompts"
        rows={4}
        value={positive}
        hint="One per line, at least two. Pairs should differ only in what the vector is about."
        onChange={setPositive}
      />
      <TextArea label="Negative prompts" rows={4} value={negative} onChange={setNegative} />
      <RunBar run={run} label="Train" onRun={train}>
        <span class="status" role="status">
          {progress}
        </span>
      </RunBar>
      {made && <Made vector={made} />}
    </details>
  );
}

function Made(props: { vector: Vector }) {
  const { name, version, training } = props.vector;
  if (!training) return null;
  return (
    <div>
      <p role="status" class="hint">
        {name}, version {version}, is saved. Its best layer is {training.best_layer}, measured on{" "}
        {training.num_held_out} held-out prompts.
      </p>
      <Chart
        label={`How well each layer of ${name} separates the held-out prompts`}
        series={[{ name: "separation", values: training.layers.map((score) => score.separation) }]}
        places={training.layers.map((score) => String(score.layer))}
        x="layer"
        y="separation (standard deviations)"
      />
    </div>
  );
}

function lines(text: string): string[] {
  return text
    .split("\n")
    .map((line) => line.trim())
    .filter(Boolean);
}
