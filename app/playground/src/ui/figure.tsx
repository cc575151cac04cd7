/** A figure, and the buttons that save it. */

import type { ComponentChildren } from "preact";
import { useRef } from "preact/hooks";

import { csv, pngOf, save, svgOf } from "../lib/figure";

export function Figure(props: {
  /** Names the files. */
  label: string;
  rows: () => (string | number | null)[][];
  children: ComponentChildren;
}) {
  const frame = useRef<HTMLDivElement>(null);
  const name = props.label.replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 60);
  const svg = () => svgOf(frame.current!);
  const files: Record<string, () => Blob | Promise<Blob>> = {
    png: () => pngOf(svg()),
    svg: () => new Blob([new XMLSerializer().serializeToString(svg())], { type: "image/svg+xml" }),
    csv: () => new Blob([csv(props.rows())], { type: "text/csv" }),
  };
  return (
    <div class="figure">
      <div ref={frame}>{props.children}</div>
      <p class="save" role="group" aria-label={`Save: ${props.label}`}>
        {Object.entries(files).map(([kind, make]) => (
          <button
            key={kind}
            type="button"
            class="quiet"
            onClick={async () => save(await make(), `${name}.${kind}`)}
          >
            {kind.toUpperCase()}
          </button>
        ))}
      </p>
    </div>
  );
}
