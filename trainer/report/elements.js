"use strict";
// Elements, numbers and colours. Text that comes from data is only ever set as text, never as HTML.

const DATA = JSON.parse(document.getElementById("data").textContent);

/** An HTML element with attributes and children: elements, or strings that become text. */
function h(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

function svg(tag, attributes = {}, ...children) {
  return filled(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) if (value !== null && value !== undefined) element.setAttribute(name, value);
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

/** A number as people read it, in about four characters: 0.0123, 48.8, 12.3k, 538M. */
function short(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size < 0.001) return value.toExponential(1);
  for (const [unit, letter] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k"]])
    if (size >= unit) return trimmed(value / (letter === "k" ? 1e3 : unit), 3) + letter;
  return size >= 1000 ? String(Math.round(value)) : trimmed(value, 3);
}

function trimmed(value, digits) {
  return String(Number(value.toPrecision(digits)));
}

function whole(value) {
  return Number.isInteger(value) ? value.toLocaleString("en") : trimmed(value, 4);
}

function duration(seconds) {
  if (seconds < 60) return `${trimmed(seconds, 3)} s`;
  const minutes = Math.round(seconds / 60);
  return seconds < 3600 ? `${Math.floor(seconds / 60)} min ${Math.floor(seconds % 60)} s` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

function colour(place) {
  return `var(--c${place % 9})`;
}

const RAMP = [[233, 246, 217], [165, 221, 185], [91, 191, 196], [47, 143, 192], [44, 92, 166], [51, 41, 122]];

/** From pale green (0) by blue to dark violet (1): distinguishable by lightness alone. Also the colour of text on it. */
function ramp(share) {
  const place = Math.min(1, Math.max(0, share)) * (RAMP.length - 1), low = Math.min(Math.floor(place), RAMP.length - 2);
  const mixed = RAMP[low].map((part, index) => Math.round(part + (place - low) * (RAMP[low + 1][index] - part)));
  const light = mixed.map((part) => (part /= 255) <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
  const luminance = 0.2126 * light[0] + 0.7152 * light[1] + 0.0722 * light[2];
  return { ground: `rgb(${mixed})`, text: luminance > 0.18 ? "#10151a" : "#ffffff" };
}

/** The colour of an age as a line or an area: the part of the scale that stands out from the ground, light or dark. */
function ageOnGround(age, most) {
  const share = age / Math.max(most, 3);
  return `light-dark(${ramp(0.3 + 0.7 * share).ground}, ${ramp(0.75 * share).ground})`;
}

/** The colour of tokens so many versions behind the learner, where `most` is the largest number of the run. */
function ageColour(age, most) {
  return ramp(age / Math.max(most, 3));
}

const tip = document.getElementById("tip");

/** Show text beside a point of the window, on the side that has room for it. */
function showTip(text, x, y) {
  tip.textContent = text;
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  const left = Math.max(8, Math.min(x + 14, document.documentElement.clientWidth - width - 8));
  const top = y + 18 + height > window.innerHeight ? y - height - 12 : y + 18;
  tip.style.transform = `translate(${Math.round(left)}px, ${Math.round(Math.max(4, top))}px)`;
}

function hideTip() {
  tip.hidden = true;
}

/** A finger that is lifted leaves its tip to be read; a mouse that has left does not. */
function hideAfterMouse(event) {
  if (event.pointerType === "mouse") hideTip();
}

addEventListener("scroll", hideTip, { passive: true });
addEventListener("pointerdown", (event) => event.target.closest(".tokens, .lanes") || hideTip());

/** Call `draw(width)` now and whenever the element gets another width. */
function redrawn(element, draw) {
  let known = 0;
  const update = () => {
    const width = Math.floor(element.clientWidth);
    if (width && width !== known) draw((known = width));
  };
  new ResizeObserver(() => requestAnimationFrame(update)).observe(element);
}
