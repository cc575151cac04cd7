/** A map of cells that is gone through with the arrow keys: layers or tokens down, tokens across. */

import { memo } from "preact/compat";
import { useLayoutEffect, useRef } from "preact/hooks";

import { Figure } from "./figure";

export interface GridCell {
  text: string;
  /** Colour, 0 to 1, or -1 to 1 where both sides have one. */
  heat: number;
  label: string;
}

export interface Place {
  row: number;
  column: number;
}

interface GridProps {
  label: string;
  /** What rows and columns are. */
  axes: [string, string];
  rows: string[];
  columns: string[];
  cell: (row: number, column: number) => GridCell | undefined;
  active: Place;
  chosen?: Place | null;
  onActive: (place: Place) => void;
  onChoose?: (place: Place) => void;
  dense?: boolean;
}

const STEPS: Record<string, [number, number]> = {
  ArrowUp: [-1, 0],
  ArrowDown: [1, 0],
  ArrowLeft: [0, -1],
  ArrowRight: [0, 1],
  PageUp: [-5, 0],
  PageDown: [5, 0],
};
/** As wide as what fades at the edge, in pixels. */
const FADE = 48;

/** Returns the place nearest to one that a map of so many rows and columns has. */
export function clamped(place: Place, rows: number, columns: number): Place {
  return {
    row: Math.max(0, Math.min(rows - 1, place.row)),
    column: Math.max(0, Math.min(columns - 1, place.column)),
  };
}

export function Grid(props: GridProps) {
  const table = useRef<HTMLTableElement>(null);
  const clamp = (place: Place) => clamped(place, props.rows.length, props.columns.length);
  const active = clamp(props.active);
  const shouldFocus = useRef(false);
  useLayoutEffect(() => {
    if (!shouldFocus.current) return;
    shouldFocus.current = false;
    table.current?.querySelector<HTMLElement>('td[tabindex="0"]')?.focus();
  }, [active.row, active.column]);
  const isPointed = useRef(false);
  const isLast = active.column === props.columns.length - 1;
  useLayoutEffect(() => {
    // Scrolls the map alone, and never beneath a pointer; the last column fades once there is another.
    const wasPointed = isPointed.current;
    isPointed.current = false;
    const frame = table.current!.parentElement!;
    const cell = frame.querySelector('td[tabindex="0"]')?.getBoundingClientRect();
    if (wasPointed || !cell) return;
    const left = frame.querySelector(".corner")!.getBoundingClientRect().right;
    const right = frame.getBoundingClientRect().right - FADE;
    if (cell.right > right) frame.scrollLeft += cell.right - right;
    else if (cell.left < left) frame.scrollLeft -= left - cell.left;
  }, [active.column, isLast]);
  const onKey = (event: KeyboardEvent) => {
    const step = STEPS[event.key];
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      props.onChoose?.(active);
    } else if (event.key === "Home" || event.key === "End") {
      event.preventDefault();
      shouldFocus.current = true;
      props.onActive(clamp({ row: active.row, column: event.key === "Home" ? 0 : props.columns.length }));
    } else if (step) {
      event.preventDefault();
      shouldFocus.current = true;
      props.onActive(clamp({ row: active.row + step[0], column: active.column + step[1] }));
    }
  };
  const placeOf = (event: Event): Place | null => {
    const cell = (event.target as Element).closest<HTMLElement>("td");
    return cell ? { row: Number(cell.dataset["row"]), column: Number(cell.dataset["column"]) } : null;
  };
  const point = (event: Event) => {
    const place = placeOf(event);
    if (!place || (place.row === active.row && place.column === active.column)) return;
    isPointed.current = place.column !== active.column;
    props.onActive(place);
  };
  /** Browsers also say that a pointer moved when the map scrolled beneath it, as the keys make it do. */
  const follow = (event: MouseEvent) => {
    if (event.movementX || event.movementY) point(event);
  };
  const choose = (event: Event) => {
    const place = placeOf(event);
    if (place) props.onChoose?.(place);
  };
  const rows = () => [
    [...props.axes, "text", "value"],
    ...props.rows.flatMap((row, rowIndex) =>
      props.columns.map((column, index) => {
        const cell = props.cell(rowIndex, index);
        return [row, column, cell?.text ?? "", cell?.heat ?? ""];
      }),
    ),
  ];
  return (
    <Figure label={props.label} rows={rows}>
      <div class="grid-frame">
        <table
          ref={table}
          role="grid"
          class={`grid ${props.dense ? "dense" : ""}`}
          aria-label={props.label}
          onKeyDown={onKey}
          onMouseMove={follow}
          onFocusIn={point}
          onClick={choose}
        >
          <thead>
            <tr>
              <th scope="col" class="corner">
                {`${props.axes[0]} ↓\n${props.axes[1]} →`}
              </th>
              {props.columns.map((column, index) => (
                <th key={index} scope="col" class={index === active.column ? "here" : ""} title={column}>
                  {column}
                </th>
              ))}
            </tr>
          </thead>
          <tbody>
            {props.rows.map((row, rowIndex) => (
              <tr key={rowIndex}>
                <th scope="row" class={rowIndex === active.row ? "here" : ""}>
                  {row}
                </th>
                {props.columns.map((_, index) => {
                  const cell = props.cell(rowIndex, index);
                  const isActive = rowIndex === active.row && index === active.column;
                  const isChosen = props.chosen?.row === rowIndex && props.chosen.column === index;
                  return (
                    <Cell
                      key={index}
                      row={rowIndex}
                      column={index}
                      text={cell?.text ?? ""}
                      heat={cell?.heat ?? 0}
                      label={cell?.label ?? "nothing yet"}
                      isActive={isActive}
                      isChosen={isChosen}
                    />
                  );
                })}
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </Figure>
  );
}

interface CellProps {
  row: number;
  column: number;
  text: string;
  heat: number;
  label: string;
  isActive: boolean;
  isChosen: boolean;
}

const Cell = memo(function Cell(props: CellProps) {
  const side = props.heat < 0 ? "below" : "above";
  const strength = Math.min(1, Math.abs(props.heat));
  const names = [side, props.isChosen ? "chosen" : ""];
  return (
    <td
      role="gridcell"
      class={names.filter(Boolean).join(" ")}
      data-row={props.row}
      data-column={props.column}
      tabIndex={props.isActive ? 0 : -1}
      aria-label={props.label}
      aria-selected={props.isChosen}
      style={{ "--heat": String(Math.round(strength * 100)) }}
    >
      {props.text}
    </td>
  );
});
