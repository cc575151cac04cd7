/** What each token of the prompt attends to, head by head. */

import { useEffect, useRef, useState } from "preact/hooks";

import { post, tokenize } from "../api/client";
import type { Answer, CaptureResult, Operation } from "../api/types";
import { generation, source } from "../lib/requests";
import { numbers, tensorOf } from "../lib/tensors";
import { percent, visible } from "../lib/text";
import { trace } from "../lib/traces";
import { useKept, usePage, useRun, useSettled } from "../state/hooks";
import { Grid, type Place } from "../ui/grid";
import { CopyBar, Legend, Problem, ViewRun, Slider } from "../ui/parts";

const NAME = "pattern";
const POINT = "layers.*.attn.pattern";
const MAX_TOKENS = 96;

interface Pattern {
  /** Of this layer, which the field may have left since. */
  layer: number;
  tokens: string[];
  /** `[head][query][key]`. */
  heads: number[][][];
}

export function AttentionView() {
  const { state, change, capabilities, vectors } = usePage();
  const [pattern, setPattern] = useKept<Pattern | null>("attention", null);
  const run = useRun({ isThere: pattern !== null, clear: () => setPattern(null) });
  const [active, setActive] = useState<Place>({ row: 0, column: 0 });
  const { attention } = state;
  const set = (part: Partial<typeof attention>) => change({ attention: { ...attention, ...part } });
  const last = capabilities.sizes.num_layers - 1;
  const layer = Math.max(0, Math.min(last, attention.layer));
  const isOffered = capabilities.points.some((point) => point.name === POINT);

  const request = () => {
    const operation: Operation = {
      op: "capture",
      at: `layers.${layer}.attn.pattern`,
      where: { phase: "prompt" },
      dtype: "float32",
      name: NAME,
    };
    return generation(state, capabilities, [operation], 1);
  };
  const start = () =>
    run.start(async (signal) => {
      const asked = request();
      const tokens = (await tokenize(source(state), signal)).map((token) => token.text);
      if (tokens.length > MAX_TOKENS) {
        throw new Error(
          `The prompt has ${tokens.length} tokens; patterns are drawn for at most ${MAX_TOKENS}.`,
        );
      }
      const answer = await post<Answer>(asked, signal);
      const result = answer.choices[0]!.interventions!.results[NAME] as CaptureResult;
      const tensor = await tensorOf(Object.values(result.points)[0]!, new Map(), signal);
      setPattern({ layer, tokens, heads: byHead(numbers(tensor), tensor.shape) });
      setActive({ row: tokens.length - 1, column: 0 });
    });
  useSettled(String(layer), () => run.hasRun && start());

  const head = Math.min(attention.head, (pattern?.heads.length ?? 1) - 1);
  const shown = pattern?.heads[head];
  if (!isOffered)
    return <Problem text="This server does not offer attention patterns; see /v1/capabilities." />;
  return (
    <>
      <div class="fields">
        <Slider
          label="Layer"
          value={layer}
          min={0}
          max={last}
          step={1}
          onChange={(layer) => set({ layer: Math.round(layer) })}
        />
      </div>
      <ViewRun run={run} onRun={start} />
      {pattern && shown && (
        <>
          <div class="heads" role="group" aria-label={`Heads of layer ${pattern.layer}`}>
            {pattern.heads.map((rows, index) => (
              <button
                key={index}
                type="button"
                aria-pressed={index === head}
                onClick={() => set({ head: index })}
              >
                <Thumbnail rows={rows} />
                Head {index}
              </button>
            ))}
          </div>
          <h3>
            Layer {pattern.layer}, head {head}
          </h3>
          <Legend low="0 %" high="100 % of its attention" />
          <Grid
            label={`Layer ${pattern.layer}, head ${head}: how much each token attends to each`}
            axes={["from", "to"]}
            dense
            rows={pattern.tokens.map(visible)}
            columns={pattern.tokens.map(visible)}
            active={active}
            onActive={setActive}
            cell={(row, column) => {
              if (column > row) return undefined;
              const share = shown[row]?.[column] ?? 0;
              return {
                text: share >= 0.1 ? percent(share).replace(" %", "") : "",
                heat: share,
                label: `${visible(pattern.tokens[row]!)} to ${visible(pattern.tokens[column]!)}: ${percent(share)}`,
              };
            }}
          />
          <p class="status" aria-live="polite">
            {said(pattern, shown, active)}
          </p>
        </>
      )}
      <CopyBar
        request={request}
        trace={() =>
          trace(request(), capabilities, vectors, {
            before: [`pattern = model.layers[${layer}].attn.pattern.save()`],
            after: ["print(pattern.shape)  # [heads, tokens, keys]"],
          })
        }
      />
    </>
  );
}

function Thumbnail(props: { rows: number[][] }) {
  const canvas = useRef<HTMLCanvasElement>(null);
  const size = props.rows.length;
  useEffect(() => {
    const context = canvas.current!.getContext("2d")!;
    const picture = context.createImageData(size, size);
    props.rows.forEach((row, query) =>
      row.forEach((share, key) =>
        picture.data.set([88, 128, 240, Math.round(share * 255)], (query * size + key) * 4),
      ),
    );
    context.putImageData(picture, 0, 0);
  }, [props.rows]);
  return <canvas ref={canvas} width={size} height={size} aria-hidden="true" />;
}

/** Returns `[query, head, key]` numbers by head. */
function byHead(values: Float32Array, shape: number[]): number[][][] {
  const [queries, heads, keys] = shape as [number, number, number];
  return Array.from({ length: heads }, (_, head) =>
    Array.from({ length: queries }, (_, query) => {
      const start = (query * heads + head) * keys;
      return [...values.subarray(start, start + keys)];
    }),
  );
}

function said(pattern: Pattern, rows: number[][], active: Place): string {
  const shares = rows[active.row] ?? [];
  const most = shares
    .map((share, key) => [share, key] as const)
    .sort(([one], [other]) => other - one)
    .slice(0, 3)
    .filter(([share]) => share >= 0.01)
    .map(([share, key]) => `“${visible(pattern.tokens[key]!)}” ${percent(share)}`);
  return `“${visible(pattern.tokens[active.row] ?? "")}” attends to ${most.join(", ")}.`;
}
