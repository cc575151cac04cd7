/** What the model writes without and with the steering, beside each other. */

import { useMemo, useRef, useState } from "preact/hooks";

import { stream } from "../api/client";
import type { ApiRequest, ChoiceInterventions } from "../api/types";
import { compared, type Part } from "../lib/diff";
import { generation, textOf, withPreset } from "../lib/requests";
import { steerOps } from "../lib/steering";
import { plural } from "../lib/text";
import { trace } from "../lib/traces";
import { usePage, useRun, useSettled } from "../state/hooks";
import { CopyBar, RunBar } from "../ui/parts";

interface Written {
  text: string;
  isDone: boolean;
  report: ChoiceInterventions | null;
}

/** Characters of both texts that are compared at every token that comes; longer ones are at the end. */
const MAX_LIVE = 4000;
const NOTHING: Written = { text: "", isDone: false, report: null };

export function GenerateView() {
  const { state, capabilities, vectors } = usePage();
  const run = useRun();
  const [baseline, setBaseline] = useState(NOTHING);
  const [steered, setSteered] = useState(NOTHING);
  const [hasRun, setHasRun] = useState(false);
  const known = useRef("");

  const requests = () => ({
    plain: generation(state, capabilities, []),
    changed: withPreset(generation(state, capabilities, steerOps(state.steering)), state.preset),
  });
  const start = () =>
    run.start(async (signal) => {
      setHasRun(true);
      const { plain, changed } = requests();
      const isSteered = changed.body["interventions"] !== undefined || state.preset !== "";
      const waiting: Promise<void>[] = [];
      if (known.current !== JSON.stringify(plain)) {
        known.current = "";
        waiting.push(
          write(plain, setBaseline, signal).then(() => {
            known.current = JSON.stringify(plain);
          }),
        );
      }
      if (isSteered) waiting.push(write(changed, setSteered, signal));
      else setSteered(NOTHING);
      await Promise.all(waiting);
    });
  useSettled(JSON.stringify([state.steering, state.preset, state.sampling]), () => hasRun && start());

  const hasSteering = state.preset !== "" || state.steering.some((steer) => steer.on && steer.vector);
  const areBothThere = baseline.text !== "" && steered.text !== "";
  const isMarked = areBothThere && (!run.isRunning || baseline.text.length + steered.text.length < MAX_LIVE);
  const parts = useMemo(
    () =>
      isMarked
        ? compared(baseline.text, steered.text)
        : {
            before: [{ text: baseline.text, differs: false }],
            after: [{ text: steered.text, differs: false }],
          },
    [baseline.text, steered.text, isMarked],
  );
  return (
    <>
      <RunBar run={run} label="Run" onRun={start} />
      <div class="compare">
        <Column
          title="Baseline"
          written={baseline}
          parts={parts.before}
          mark="removed"
          empty="What the model writes by itself."
        />
        <Column
          title="Steered"
          written={steered}
          parts={parts.after}
          mark="added"
          empty={hasSteering ? "What it writes with the steering." : "Add a vector under Steering, and run."}
        />
      </div>
      {areBothThere && (
        <p class="hint">
          Marked is what the other text does not have. {steered.report && said(steered.report)}
        </p>
      )}
      <CopyBar
        request={() => requests().changed}
        trace={() =>
          state.preset
            ? { missing: "A block has no presets: it steers with vectors." }
            : trace(requests().changed, capabilities, vectors)
        }
      />
    </>
  );
}

function Column(props: {
  title: string;
  written: Written;
  parts: Part[];
  mark: "removed" | "added";
  empty: string;
}) {
  return (
    <article class="written" aria-label={props.title}>
      <h3>{props.title}</h3>
      <p class="text" aria-busy={!props.written.isDone && props.written.text !== ""}>
        {props.written.text === "" && !props.written.isDone ? (
          <span class="hint">{props.empty}</span>
        ) : (
          props.parts.map((part, index) =>
            part.differs ? (
              <mark key={index} class={props.mark}>
                {part.text}
              </mark>
            ) : (
              <span key={index}>{part.text}</span>
            ),
          )
        )}
      </p>
    </article>
  );
}

/** Streams an answer into a column; what was there before stays until the first token is. */
async function write(
  request: ApiRequest,
  set: (written: Written) => void,
  signal: AbortSignal,
): Promise<void> {
  let text = "";
  let report: ChoiceInterventions | null = null;
  for await (const answer of stream(request, signal)) {
    text += textOf(answer);
    const told = answer.choices[0]?.interventions;
    if (told?.applied) report = told;
    if (text) set({ text, isDone: false, report });
  }
  set({ text, isDone: true, report });
}

function said(report: ChoiceInterventions): string {
  const places = report.applied!.map(
    (applied) => `${plural(applied.positions.length, "position")} of ${plural(applied.at.length, "place")}`,
  );
  const steps = report.provenance?.tier === "eager" ? "uncompiled steps" : "the usual steps";
  return `Steered at ${places.join(", and at ")}, in ${steps}.`;
}
