// Colours of an axis: ten that are told apart for few values, a band of hues in order for many. Light and dark have their own.
import { themeColour } from "./dom.js"

const FEW = 10;

// A function from an index to a colour as text, for an axis of `count` values.
export function axisColours(count) {
  if (count <= FEW) {
    const few = Array.from({ length: FEW }, (_, i) => themeColour(`c${i}`));
    return (index) => few[index % FEW];
  }
  const isDark = matchMedia("(prefers-color-scheme: dark)").matches;
  const many = Array.from({ length: count }, (_, i) => bandColour(i / (count - 1), isDark));
  return (index) => many[index % count];
}

// Blue over green and yellow to red, of one lightness: neighbours look alike, and ends do not.
function bandColour(share, isDark) {
  return oklchHex((isDark ? 0.7 : 0.78) + 0.05 * Math.sin(share * Math.PI), isDark ? 0.12 : 0.11, 262 - 236 * share);
}

// From a lightness, a chroma and a hue in degrees to #rrggbb (Björn Ottosson's OKLab).
export function oklchHex(lightness, chroma, hue) {
  const a = chroma * Math.cos((hue * Math.PI) / 180);
  const b = chroma * Math.sin((hue * Math.PI) / 180);
  const l = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3;
  const m = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3;
  const s = (lightness - 0.0894841775 * a - 1.291485548 * b) ** 3;
  const linear = [
    4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s,
    -1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s,
    -0.0041960863 * l - 0.7034186147 * m + 1.707614701 * s,
  ];
  return `#${linear.map((x) => Math.round(255 * gammaOf(Math.min(1, Math.max(0, x)))).toString(16).padStart(2, "0")).join("")}`;
}

function gammaOf(x) {
  return x <= 0.0031308 ? 12.92 * x : 1.055 * x ** (1 / 2.4) - 0.055;
}
