/** What the model writes without and with the steering, beside each other. */

import { useMemo, useRef, useState } from "preact/hooks";

import { stream, tokenize } from "../api/client";
import type { ApiRequest, Choice, ChoiceInterventions, Operation } from "../api/types";
import { markOps } from "../lib/conditions";
import { compared, type Part } from "../lib/diff";
import { generation, source, textOf, tokensIn, withPreset, withTokens } from "../lib/requests";
import { isSteering, steerOps } from "../lib/steering";
import { plural } from "../lib/text";
import { trace } from "../lib/traces";
import { extended, watchOps, watchedFrom, type Watched } from "../lib/watching";
import { usePage, useRun, useSettled } from "../state/hooks";
import type { PageState } from "../state/page";
import { CopyBar, RunBar } from "../ui/parts";
import { WatchedText } from "../ui/watched";

interface Written {
  text: string;
  isDone: boolean;
  report: ChoiceInterventions | null;
  watched: Watched | null;
  /** The name of the stop that ended it. */
  stoppedBy: string;
}

/** Characters of both texts that are compared at every token that comes; longer ones are at the end. */
const MAX_LIVE = 4000;
const NOTHING: Written = { text: "", isDone: false, report: null, watched: null, stoppedBy: "" };
const WRITES = new Set(["steer", "feature", "ablate", "patch"]);

export function GenerateView() {
  const { state, capabilities, vectors, detectors } = usePage();
  const run = useRun();
  const [baseline, setBaseline] = useState(NOTHING);
  const [steered, setSteered] = useState(NOTHING);
  const [hasRun, setHasRun] = useState(false);
  const known = useRef("");

  /** What is read is read from both texts; a stop ends the steered one alone. */
  const requests = () => {
    const marks = markOps(state.marks, detectors);
    const watched = watchOps(state.watched);
    const reads = [...watched, ...marks.filter(({ op }) => op === "flag")];
    const writes = [...steerOps(state, detectors), ...marks.filter(({ op }) => op === "stop")];
    return {
      plain: generation(state, capabilities, reads),
      changed: withPreset(generation(state, capabilities, [...writes, ...reads]), state.preset),
      isChanged: writes.length > 0 || state.preset !== "",
    };
  };
  const start = () =>
    run.start(async (signal) => {
      setHasRun(true);
      const { plain, changed, isChanged } = requests();
      const waiting: Promise<void>[] = [];
      if (known.current !== JSON.stringify(plain)) {
        known.current = "";
        waiting.push(
          write(state, plain, setBaseline, signal).then(() => {
            known.current = JSON.stringify(plain);
          }),
        );
      }
      if (isChanged) waiting.push(write(state, changed, setSteered, signal));
      else setSteered(NOTHING);
      await Promise.all(waiting);
    });
  const { steering, sliders, marks, watched, preset, sampling } = state;
  useSettled(JSON.stringify([steering, sliders, marks, watched, preset, sampling]), () => hasRun && start());

  const hasSteering = preset !== "" || isSteering(state);
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
      {props.written.stoppedBy && <p class="hint">Ended by “{props.written.stoppedBy}”.</p>}
      {props.written.watched && <WatchedText title={props.title} watched={props.written.watched} />}
    </article>
  );
}

/** Streams an answer into a column; what was there before stays until the first token is. */
async function write(
  state: PageState,
  request: ApiRequest,
  set: (written: Written) => void,
  signal: AbortSignal,
): Promise<void> {
  const operations = (request.body["interventions"] ?? []) as Operation[];
  const isWatched = operations.some(({ op, when }) => !WRITES.has(op) || when !== undefined);
  let written = NOTHING;
  if (isWatched) {
    const prompt = await tokenize(source(state), signal);
    written = { ...written, watched: watchedFrom(prompt.map((token) => token.text)) };
  }
  for await (const answer of stream(isWatched ? withTokens(request) : request, signal)) {
    const choice = answer.choices[0];
    const told = choice?.interventions;
    const tokens = isWatched ? await tokensIn(answer, signal) : [];
    written = {
      text: written.text + textOf(answer),
      isDone: false,
      report: told?.applied ? told : written.report,
      watched: written.watched && extended(written.watched, answer, tokens, operations),
      stoppedBy: stopOf(choice) ?? written.stoppedBy,
    };
    if (written.text) set(written);
  }
  set({ ...written, isDone: true });
}

function stopOf(choice: Choice | undefined): string | undefined {
  const reason = choice?.stop_reason;
  return typeof reason === "object" && reason !== null ? reason.intervention : undefined;
}

function said(report: ChoiceInterventions): string {
  const places = report
    .applied!.filter(({ op }) => WRITES.has(op))
    .map(
      (applied) => `${plural(applied.positions.length, "position")} of ${plural(applied.at.length, "place")}`,
    );
  if (!places.length) return "";
  const steps = report.provenance?.tier === "eager" ? "uncompiled steps" : "the usual steps";
  return `Steered at ${places.join(", and at ")}, in ${steps}.`;
}
