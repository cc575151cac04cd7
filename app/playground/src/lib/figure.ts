/** A figure of the page as a file: SVG of what it shows, PNG of that, CSV of its values. */

const SVG = "http://www.w3.org/2000/svg";
const PAD = 8;
const SCALE = 2;
const PAINTS = [
  "fill",
  "stroke",
  "stroke-width",
  "stroke-dasharray",
  "font-size",
  "font-family",
  "font-weight",
  "text-anchor",
];

/** Returns rows as CSV. */
export function csv(rows: (string | number | null)[][]): string {
  const cell = (value: string | number | null) => {
    const text = String(value ?? "");
    return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  return rows.map((row) => `${row.map(cell).join(",")}\n`).join("");
}

/** Returns a part of the page as an SVG of rectangles and texts, charts in it as they are. */
export function svgOf(figure: HTMLElement): SVGSVGElement {
  const svg = made("svg", {});
  const ground = made("rect", {
    width: "100%",
    height: "100%",
    fill: rgb(style(figure.closest(".panel")!, "background-color")),
  });
  svg.append(ground);
  const scrolled = [...figure.querySelectorAll(".grid-frame")].map(
    (frame) => [frame, frame.scrollLeft] as const,
  );
  for (const [frame] of scrolled) frame.scrollLeft = 0;
  const { left, top } = figure.getBoundingClientRect();
  const size = { width: 0, height: 0 };
  const visit = (element: Element) => {
    const box = element.getBoundingClientRect();
    if (element.matches(".hidden, button") || !box.width) return;
    const place = { x: box.left - left + PAD, y: box.top - top + PAD, width: box.width, height: box.height };
    size.width = Math.max(size.width, place.x + place.width + PAD);
    size.height = Math.max(size.height, place.y + place.height + PAD);
    if (element instanceof SVGSVGElement) {
      svg.append(copied(element, place.x, place.y));
      return;
    }
    const look = getComputedStyle(element);
    if (!/^(transparent|rgba\(0, 0, 0, 0\))$/.test(look.backgroundColor)) {
      svg.append(made("rect", { ...place, fill: rgb(look.backgroundColor) }));
    }
    for (const child of element.childNodes) {
      if (child instanceof Element) visit(child);
      else for (const text of lines(child)) svg.append(written(text, look, place, left - PAD, top - PAD));
    }
  };
  visit(figure);
  for (const [frame, at] of scrolled) frame.scrollLeft = at;
  svg.setAttribute("width", String(Math.ceil(size.width)));
  svg.setAttribute("height", String(Math.ceil(size.height)));
  return svg;
}

/** Returns an SVG as a PNG of twice its size. */
export async function pngOf(svg: SVGSVGElement): Promise<Blob> {
  const image = new Image();
  const bytes = new TextEncoder().encode(new XMLSerializer().serializeToString(svg));
  const binary = Array.from(bytes, (byte) => String.fromCharCode(byte)).join("");
  image.src = `data:image/svg+xml;base64,${btoa(binary)}`;
  await image.decode();
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [image.width * SCALE, image.height * SCALE];
  canvas.getContext("2d")!.drawImage(image, 0, 0, canvas.width, canvas.height);
  return new Promise((resolve) => canvas.toBlob((blob) => resolve(blob!), "image/png"));
}

export function save(content: Blob, name: string): void {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(content);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

interface Line {
  text: string;
  box: DOMRect;
}

/** Returns the lines in which a text stands. */
function lines(node: Node): Line[] {
  const text = node.textContent ?? "";
  const range = document.createRange();
  const found: Line[] = [];
  for (let start = 0; start < text.length; start += 1) {
    range.setStart(node, start);
    range.setEnd(node, start + 1);
    const box = range.getBoundingClientRect();
    const line = found.at(-1);
    if (line && Math.abs(line.box.top - box.top) < 1) {
      line.text += text[start]!;
      line.box = new DOMRect(line.box.left, line.box.top, box.right - line.box.left, line.box.height);
    } else found.push({ text: text[start]!, box });
  }
  return found.filter((line) => line.text.trim());
}

function written(
  { text, box }: Line,
  look: CSSStyleDeclaration,
  cell: { x: number; y: number; width: number; height: number },
  left: number,
  top: number,
): SVGElement {
  const [x, y] = [box.left - left, box.top - top];
  const isVertical = look.writingMode.startsWith("vertical");
  const middle = `${isVertical ? x + box.width / 2 : x}`;
  const attributes: Record<string, string | number> = isVertical
    ? { transform: `translate(${middle} ${cell.y + cell.height - 4}) rotate(-90)` }
    : { x: Math.max(x, cell.x), y: y + box.height / 2 };
  const isCut = look.textOverflow === "ellipsis" && box.width > cell.width;
  const shown = isCut ? `${text.slice(0, Math.floor((text.length * cell.width) / box.width) - 1)}…` : text;
  const element = made("text", {
    ...attributes,
    "dominant-baseline": "central",
    "font-family": look.fontFamily,
    "font-size": look.fontSize,
    "font-weight": look.fontWeight,
    fill: rgb(look.color),
    "xml:space": "preserve",
  });
  element.textContent = shown;
  return element;
}

/** Returns a chart with its colours and fonts beside its shapes. */
function copied(chart: SVGSVGElement, x: number, y: number): SVGElement {
  const copy = chart.cloneNode(true) as SVGSVGElement;
  const originals = chart.querySelectorAll("*");
  copy.querySelectorAll("*").forEach((element, index) => {
    for (const name of PAINTS) {
      const value = style(originals[index]!, name);
      element.setAttribute(name, name === "fill" || name === "stroke" ? rgb(value) : value);
    }
    element.removeAttribute("class");
  });
  copy.setAttribute("x", String(x));
  copy.setAttribute("y", String(y));
  return copy;
}

const pixel = document.createElement("canvas").getContext("2d", { willReadFrequently: true })!;

/** Returns a colour as every program reads it. */
function rgb(colour: string): string {
  if (colour === "none") return colour;
  pixel.clearRect(0, 0, 1, 1);
  pixel.fillStyle = colour;
  pixel.fillRect(0, 0, 1, 1);
  const [red, green, blue] = pixel.getImageData(0, 0, 1, 1).data;
  return `rgb(${red}, ${green}, ${blue})`;
}

function style(element: Element, name: string): string {
  return getComputedStyle(element).getPropertyValue(name);
}

function made<K extends keyof SVGElementTagNameMap>(
  name: K,
  attributes: Record<string, string | number>,
): SVGElementTagNameMap[K] {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, String(value));
  return element;
}
