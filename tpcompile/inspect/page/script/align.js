// Which lines of a part before a pass stand beside which after it, and what differs in them.

/** The user's lines beside what was captured of them. */
function userLines(after) {
  let last = -1;
  return after.map((line) => {
    const source = line.source !== undefined && line.source !== last ? data.lines[line.source] : null;
    last = line.source ?? last;
    return { left: source && { kind: "code", source }, right: line, how: "equal" };
  });
}

/** What a pass found, each beside the value that it is about; where there are no values, two lists. */
function told(before, after, graph) {
  if (!graph)
    return Array.from({ length: Math.max(before.length, after.length) }, (_, place) => ({
      left: before[place] ?? null,
      right: after[place] ?? null,
      how: "told",
    }));
  const about = Map.groupBy(after, (line) => line.tokens[0]?.name);
  const pairs = before.flatMap((line) => {
    const found = about.get(line.name) ?? [null];
    about.delete(line.name);
    return found.map((right, place) => ({ left: place ? null : line, right, how: right ? "told" : "equal" }));
  });
  return [...pairs, ...[...about.values()].flat().map((right) => ({ left: null, right, how: "told" }))];
}

/** Pairs of lines in order. Lines of the same value are a pair where their order is kept; others face what stands in the same gap. */
function align(before, after) {
  const key = (line) => line.name || `${line.kind} ${line.tokens.map((token) => token.name ?? token).join("")}`;
  const place = new Map(after.map((line, index) => [key(line), index]));
  const common = before.map((line, index) => [index, place.get(key(line))]).filter(([, other]) => other !== undefined);
  const pairs = [];
  let left = 0,
    right = 0;
  for (const [i, j] of [...increasing(common), [before.length, after.length]]) {
    while (left < i || right < j) {
      const pair = { left: left < i ? before[left++] : null, right: right < j ? after[right++] : null };
      pairs.push({ ...pair, how: "differs" });
    }
    if (i < before.length) {
      pairs.push({ left: before[i], right: after[j], how: textOf(before[i]) === textOf(after[j]) ? "equal" : "changed" });
      [left, right] = [i + 1, j + 1];
    }
  }
  return pairs;
}

/** The longest run of pairs that rises on both sides. */
function increasing(pairs) {
  const ends = [],
    from = [];
  pairs.forEach(([, value], index) => {
    let low = 0,
      high = ends.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (pairs[ends[middle]][1] < value) low = middle + 1;
      else high = middle;
    }
    from[index] = low ? ends[low - 1] : -1;
    ends[low] = index;
  });
  const kept = [];
  for (let index = ends.at(-1) ?? -1; index >= 0; index = from[index]) kept.push(pairs[index]);
  return kept.reverse();
}

/** A text in words and what is between them. */
const words = (text) => text.match(/[\w@·{}:.+|-]+|[^\w@·{}:.+|-]+/g) ?? [];

/** Mark the words of a line that the other line of its value does not have, in their order. */
function markChanges(made, other) {
  const own = [...made.querySelectorAll("[data-word]")];
  const its = [...other.querySelectorAll("[data-word]")].map((word) => word.textContent);
  const longest = own.map(() => new Uint16Array(its.length + 1));
  longest.push(new Uint16Array(its.length + 1));
  for (let i = own.length - 1; i >= 0; i--) {
    for (let j = its.length - 1; j >= 0; j--)
      longest[i][j] = own[i].textContent === its[j] ? longest[i + 1][j + 1] + 1 : Math.max(longest[i + 1][j], longest[i][j + 1]);
  }
  for (let i = 0, j = 0; i < own.length; i++) {
    while (j < its.length && own[i].textContent !== its[j] && longest[i][j + 1] >= longest[i + 1][j] && longest[i][j + 1] === longest[i][j])
      j++;
    if (j < its.length && own[i].textContent === its[j]) j++;
    else if (/\w/.test(own[i].textContent)) own[i].classList.add("differs");
  }
}
