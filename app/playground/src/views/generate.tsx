/** The model's text without and with steering, side by side. */

import { Fragment } from "preact";
import { useMemo } from "preact/hooks";

import { stream, tokenize } from "../api/client";
import type { ApiRequest, Choice, ChoiceInterventions, Operation } from "../api/types";
import { markOps } from "../lib/conditions";
import { compared, numWords, type Compared } from "../lib/diff";
import { generation, source, textOf, tokensIn, withPreset, withTokens } from "../lib/requests";
import { isSteering, steerOps } from "../lib/steering";
import { plural } from "../lib/text";
import { trace } from "../lib/traces";
import { extended, watchOps, watchedFrom, type Watched } from "../lib/watching";
import { IS_FIRST_VISIT, useKept, usePage, useRun, useSettled } from "../state/hooks";
import type { PageState } from "../state/page";
import { CopyBar, ViewRun } from "../ui/parts";
import { WatchedText } from "../ui/watched";

interface Written {
  /** The request that wrote it. */
  asked: string;
  text: string;
  isDone: boolean;
  report: ChoiceInterventions | null;
  watched: Watched | null;
  /** The name of the stop that ended it. */
  stoppedBy: string;
}

/** Characters of both texts that are compared at every token that comes; longer ones are at the end. */
const MAX_LIVE = 4000;
const NOTHING: Written = { asked: "", text: "", isDone: false, report: null, watched: null, stoppedBy: "" };
const WRITES = new Set(["steer", "feature", "ablate", "patch"]);

export function GenerateView() {
  const { state, capabilities, vectors, detectors } = usePage();
  const [baseline, setBaseline] = useKept("baseline", NOTHING);
  const [steered, setSteered] = useKept("steered", NOTHING);
  const clear = () => {
    setBaseline(NOTHING);
    setSteered(NOTHING);
  };
  const run = useRun({ isThere: baseline.isDone, clear });

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
    run.start(async (signal, count) => {
      const { plain, changed, isChanged } = requests();
      const isKnown = baseline.isDone && baseline.asked === JSON.stringify(plain);
      if (isKnown) setBaseline(baseline);
      else clear();
      await Promise.all([
        isKnown ? undefined : write(state, plain, setBaseline, signal, count),
        isChanged ? write(state, changed, setSteered, signal, count) : setSteered(NOTHING),
      ]);
    });
  const { steering, sliders, marks, watched, preset, sampling } = state;
  useSettled(JSON.stringify([steering, sliders, marks, watched, preset, sampling]), () => {
    if (run.hasRun || IS_FIRST_VISIT) start();
  });

  const hasSteering = preset !== "" || isSteering(state);
  const areBothThere = baseline.text !== "" && steered.text !== "";
  const isMarked = areBothThere && (!run.isRunning || baseline.text.length + steered.text.length < MAX_LIVE);
  const parts = useMemo<Compared>(
    () =>
      isMarked
        ? { ...compared(baseline.text, steered.text), ...(run.isRunning && { common: null }) }
        : {
            before: [{ text: baseline.text, differs: false }],
            after: [{ text: steered.text, differs: false }],
            common: null,
          },
    [baseline.text, steered.text, isMarked, run.isRunning],
  );
  return (
    <>
      <ViewRun run={run} onRun={start} />
      <div class="compare">
        <Column
          title="Baseline"
          written={baseline}
          parts={parts}
          side="before"
          empty="The model's own text."
        />
        <Column
          title="Steered"
          written={steered}
          parts={parts}
          side="after"
          empty={hasSteering ? "The text with steering." : "Add a vector under Steering, then run."}
        />
      </div>
      {areBothThere && (
        <p class="hint">
          {!run.isRunning &&
            (parts.common === null
              ? "Both texts are the same."
              : `The texts diverge at word ${numWords(parts.common) + 1}; differences are marked.`)}{" "}
          {steered.report && said(steered.report)}
        </p>
      )}
      <CopyBar
        request={() => requests().changed}
        trace={() =>
          state.preset
            ? { missing: "Traces have no presets; steer with vectors instead." }
            : trace(requests().changed, capabilities, vectors)
        }
      />
    </>
  );
}

function Column(props: {
  title: string;
  written: Written;
  parts: Compared;
  side: "before" | "after";
  empty: string;
}) {
  const { common } = props.parts;
  const divergence = common === null ? -1 : Number(common !== "");
  return (
    <article class="written" aria-label={props.title}>
      <h3>{props.title}</h3>
      <p class="text" aria-busy={!props.written.isDone && props.written.text !== ""}>
        {props.written.text === "" && !props.written.isDone ? (
          <span class="hint">{props.empty}</span>
        ) : (
          props.parts[props.side].map((part, index) => (
            <Fragment key={index}>
              {index === divergence && <span class="divergence" title="First divergence" />}
              {part.differs ? (
                <mark class={props.side === "before" ? "removed" : "added"}>{part.text}</mark>
              ) : (
                part.text
              )}
            </Fragment>
          ))
        )}
      </p>
      {props.written.stoppedBy && <p class="hint">Ended by “{props.written.stoppedBy}”.</p>}
      {props.written.watched && <WatchedText title={props.title} watched={props.written.watched} />}
    </article>
  );
}

/** Streams an answer into a column. */
async function write(
  state: PageState,
  request: ApiRequest,
  set: (written: Written) => void,
  signal: AbortSignal,
  count: (numTokens: number) => void,
): Promise<void> {
  const operations = (request.body["interventions"] ?? []) as Operation[];
  const isWatched = operations.some(({ op, when }) => !WRITES.has(op) || when !== undefined);
  let written: Written = { ...NOTHING, asked: JSON.stringify(request) };
  if (isWatched) {
    const prompt = await tokenize(source(state), signal);
    written = { ...written, watched: watchedFrom(prompt.map((token) => token.text)) };
  }
  for await (const answer of stream(withTokens(request), signal)) {
    const choice = answer.choices[0];
    count(choice?.token_ids?.length ?? 0);
    const told = choice?.interventions;
    const tokens = isWatched ? await tokensIn(answer, signal) : [];
    written = {
      ...written,
      text: written.text + textOf(answer),
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
    .map(({ positions, at }) => {
      const points = at.length === 1 ? at[0] : plural(at.length, "point");
      return `${plural(positions.length, "position")} at ${points}`;
    });
  if (!places.length) return "";
  const steps = report.provenance?.tier === "eager" ? " Its steps ran uncompiled." : "";
  return `Steered ${places.join(" and ")}.${steps}`;
}
