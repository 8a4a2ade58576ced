//! A picture of replies around a failover, as SVG: each reply a dot at its arrival, its latency
//! on a logarithmic scale; below, the outage enlarged with its named parts.

mod axis;
pub mod timeline;

use std::collections::BTreeMap;
use std::fmt::Write;
use std::time::Duration;

use self::axis::{Axis, Plot, decade_label, step_for};
use crate::clients::{Outcome, Reply};
use crate::clock::{Instant, millis};

const WIDTH: f64 = 1000.0;
const HEIGHT: f64 = 640.0;
const MAIN: Plot = Plot { left: 90.0, top: 96.0, width: 886.0, height: 330.0 };
const PARTS: Plot = Plot { left: 90.0, top: 516.0, width: 886.0, height: 44.0 };
const INK: &str = "#1f2933";
const FAINT: &str = "#616e7c";
const GRID: &str = "#e4e7eb";
const GOOD: &str = "#2467b3";
const BAD: &str = "#c81e1e";
const SHADE: &str = "#fde8e8";
const PART_COLOURS: [&str; 4] = ["#f0b429", "#2bb0a6", "#7b61c9", "#8aa4bf"];

/// A named part of an outage.
#[derive(Clone, Debug)]
pub struct Part {
    /// Such as `detect`.
    pub name: &'static str,
    /// Its length.
    pub length: Duration,
}

/// What is to be seen.
#[derive(Clone, Debug)]
pub struct Picture<'a> {
    /// The headline.
    pub title: String,
    /// A line below it.
    pub subtitle: String,
    /// All requests and what became of them.
    pub replies: &'a [Reply],
    /// When the primary died: second 0 of the time axis.
    pub death: Instant,
    /// Last reply before and first reply after, if there was one after.
    pub outage: Option<(Instant, Instant)>,
    /// The parts of the outage from the death on, in order.
    pub parts: Vec<Part>,
    /// How much of the time before the death is shown.
    pub before: Duration,
    /// How much of the time after it.
    pub after: Duration,
}

impl Picture<'_> {
    /// Draws it.
    pub fn svg(&self) -> String {
        let mut svg = String::new();
        let time = Axis::linear(-self.before.as_secs_f64(), self.after.as_secs_f64());
        let latency = self.latency_axis();
        self.frame(&mut svg);
        self.shade(&mut svg, &time);
        grid(&mut svg, &time, &latency);
        self.dots(&mut svg, &time, &latency);
        self.death_mark(&mut svg, &time);
        self.enlarged(&mut svg);
        svg.push_str("</svg>\n");
        svg
    }

    fn seconds(&self, instant: Instant) -> f64 {
        (instant.0 as f64 - self.death.0 as f64) / 1e9
    }

    /// Whole decades around what was measured, in seconds.
    fn latency_axis(&self) -> Axis {
        let shown = self.replies.iter().filter(|reply| reply.outcome == Outcome::Good);
        let latencies = shown.map(|reply| reply.latency().as_secs_f64().max(1e-6));
        let (least, most) = latencies.fold((1e-3_f64, 1e-2_f64), |(least, most), latency| {
            (least.min(latency), most.max(latency))
        });
        Axis::decades(least, most)
    }

    fn frame(&self, svg: &mut String) {
        let (title, subtitle) = (escape(&self.title), escape(&self.subtitle));
        put(
            svg,
            format_args!(
                "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" \
                 width=\"{WIDTH}\" height=\"{HEIGHT}\" font-family=\"system-ui, 'Segoe UI', \
                 'DejaVu Sans', Helvetica, Arial, sans-serif\">\n\
                 <rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n\
                 <text x=\"24\" y=\"36\" font-size=\"21\" font-weight=\"600\" \
                 fill=\"{INK}\">{title}</text>\n\
                 <text x=\"24\" y=\"62\" font-size=\"14.5\" fill=\"{FAINT}\">{subtitle}</text>\n"
            ),
        );
    }

    fn shade(&self, svg: &mut String, time: &Axis) {
        let Some((last, first)) = self.outage else { return };
        let left = MAIN.x(time, self.seconds(last));
        let width = (MAIN.x(time, self.seconds(first)) - left).max(1.0);
        let (top, height) = (MAIN.top, MAIN.height);
        put(
            svg,
            format_args!(
                "<rect x=\"{left:.1}\" y=\"{top}\" width=\"{width:.1}\" height=\"{height}\" \
                 fill=\"{SHADE}\"/>\n"
            ),
        );
    }

    /// One mark for all replies that fall on the same spot, so that the file stays small; more
    /// replies make it darker.
    fn dots(&self, svg: &mut String, time: &Axis, latency: &Axis) {
        let mut good: BTreeMap<(i64, i64), u32> = BTreeMap::new();
        let mut bad: BTreeMap<(i64, i64), u32> = BTreeMap::new();
        for reply in self.replies {
            let at = self.seconds(reply.done);
            if !time.holds(at) {
                continue;
            }
            let spot = (
                (MAIN.x(time, at) / 1.5).round() as i64,
                (MAIN.y(latency, reply.latency().as_secs_f64().max(1e-9)) / 1.5).round() as i64,
            );
            let spots = if reply.outcome == Outcome::Good { &mut good } else { &mut bad };
            *spots.entry(spot).or_default() += 1;
        }
        for (opacity, counts) in [(0.35, 1..=1), (0.6, 2..=4), (0.9, 5..=u32::MAX)] {
            let marks = good.iter().filter(|(_, count)| counts.contains(count));
            let path: String = marks
                .map(|((x, y), _)| format!("M{:.1} {:.1}h0", *x as f64 * 1.5, *y as f64 * 1.5))
                .collect();
            put(
                svg,
                format_args!(
                    "<path d=\"{path}\" stroke=\"{GOOD}\" stroke-opacity=\"{opacity}\" \
                     stroke-width=\"3\" stroke-linecap=\"round\" fill=\"none\"/>\n"
                ),
            );
        }
        let crosses: String = bad
            .keys()
            .map(|(x, y)| (*x as f64 * 1.5, *y as f64 * 1.5))
            .map(|(x, y)| format!("M{:.1} {:.1}l8 8m-8 0l8 -8", x - 4.0, y - 4.0))
            .collect();
        put(
            svg,
            format_args!(
                "<path d=\"{crosses}\" stroke=\"{BAD}\" stroke-width=\"1.6\" fill=\"none\"/>\n"
            ),
        );
        legend(svg, !bad.is_empty());
    }

    fn death_mark(&self, svg: &mut String, time: &Axis) {
        let x = MAIN.x(time, 0.0);
        let (top, bottom) = (MAIN.top, MAIN.bottom());
        put(
            svg,
            format_args!(
                "<line x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{top}\" y2=\"{bottom}\" stroke=\"{BAD}\" \
                 stroke-width=\"1.5\"/>\n"
            ),
        );
        let y = top + 18.0;
        let left = x - 8.0;
        text(svg, left, y, "end", 13.0, BAD, "primary killed");
        let Some((last, first)) = self.outage else { return };
        let right = MAIN.x(time, self.seconds(first)) + 8.0;
        let length = millis(first.since(last));
        text(svg, right, y, "start", 13.0, BAD, &format!("outage {length:.1} ms"));
    }

    /// The outage from the last reply to the first, stretched over the whole width.
    fn enlarged(&self, svg: &mut String) {
        let Some((last, first)) = self.outage else { return };
        let length = millis(first.since(last));
        let start = millis(self.death.since(last));
        let axis = Axis::linear(0.0, length.max(0.001));
        text(svg, PARTS.left, PARTS.top - 16.0, "start", 14.5, INK, "The outage, enlarged");
        put(
            svg,
            format_args!(
                "<rect x=\"{}\" y=\"{}\" width=\"{}\" height=\"{}\" fill=\"{SHADE}\"/>\n",
                PARTS.left, PARTS.top, PARTS.width, PARTS.height
            ),
        );
        let mut at = start;
        for (number, part) in self.parts.iter().enumerate() {
            let end = at + millis(part.length);
            self.part(svg, &axis, number, (at, end));
            at = end;
        }
        let ticks = step_for(length, 9);
        let mut tick = 0.0;
        while tick <= length {
            let x = PARTS.x(&axis, tick);
            let y = PARTS.bottom();
            put(
                svg,
                format_args!(
                    "<line x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{y}\" y2=\"{:.1}\" \
                     stroke=\"{FAINT}\"/>\n",
                    y + 5.0
                ),
            );
            text(svg, x, y + 19.0, "middle", 12.0, FAINT, &decimal(tick, ticks));
            tick += ticks;
        }
        let (middle, y) = (PARTS.left + PARTS.width / 2.0, PARTS.bottom() + 40.0);
        text(svg, middle, y, "middle", 13.0, INK, "ms since the last reply before the death");
    }

    fn part(&self, svg: &mut String, axis: &Axis, number: usize, (at, end): (f64, f64)) {
        let part = &self.parts[number];
        let colour = PART_COLOURS[number % PART_COLOURS.len()];
        let (x, top, height) = (PARTS.x(axis, at), PARTS.top, PARTS.height);
        let width = (PARTS.x(axis, end) - x).max(1.5);
        put(
            svg,
            format_args!(
                "<rect x=\"{x:.1}\" y=\"{top}\" width=\"{width:.1}\" height=\"{height}\" \
                 fill=\"{colour}\"/>\n"
            ),
        );
        let legend = PARTS.left + 180.0 + number as f64 * 176.0;
        let y = PARTS.top - 16.0;
        put(
            svg,
            format_args!(
                "<rect x=\"{legend:.1}\" y=\"{:.1}\" width=\"12\" height=\"12\" \
                 fill=\"{colour}\"/>\n",
                y - 11.0
            ),
        );
        let label = format!("{} {:.1} ms", part.name, millis(part.length));
        text(svg, legend + 18.0, y, "start", 13.0, INK, &label);
    }
}

fn grid(svg: &mut String, time: &Axis, latency: &Axis) {
    for decade in latency.decade_values() {
        let y = MAIN.y(latency, decade);
        line(svg, (MAIN.left, y), (MAIN.right(), y));
        text(svg, MAIN.left - 8.0, y + 4.0, "end", 12.0, FAINT, &decade_label(decade));
    }
    let step = step_for(time.span(), 10);
    let mut tick = (time.from() / step).ceil() * step;
    while tick <= time.to() + 1e-9 {
        let x = MAIN.x(time, tick);
        line(svg, (x, MAIN.top), (x, MAIN.bottom()));
        text(svg, x, MAIN.bottom() + 18.0, "middle", 12.0, FAINT, &decimal(tick, step));
        tick += step;
    }
    let (middle, y) = (MAIN.left + MAIN.width / 2.0, MAIN.bottom() + 38.0);
    text(svg, middle, y, "middle", 13.0, INK, "seconds since the death of the primary");
    let (x, y) = (22.0, MAIN.top + MAIN.height / 2.0);
    put(
        svg,
        format_args!(
            "<text transform=\"translate({x} {y}) rotate(-90)\" text-anchor=\"middle\" \
             font-size=\"13\" fill=\"{INK}\">latency of a reply, from when it was due</text>\n"
        ),
    );
}

fn legend(svg: &mut String, has_bad: bool) {
    let (right, y) = (MAIN.right(), 84.0);
    text(svg, right, y, "end", 12.5, FAINT, "reply");
    put(
        svg,
        format_args!("<circle cx=\"{:.1}\" cy=\"80\" r=\"3\" fill=\"{GOOD}\"/>\n", right - 40.0),
    );
    if has_bad {
        text(svg, right - 62.0, y, "end", 12.5, FAINT, "request failed");
        let x = right - 62.0 - 106.0;
        put(
            svg,
            format_args!(
                "<path d=\"M{x:.1} 76l8 8m-8 0l8 -8\" stroke=\"{BAD}\" stroke-width=\"1.6\"/>\n"
            ),
        );
    }
}

fn line(svg: &mut String, from: (f64, f64), to: (f64, f64)) {
    put(
        svg,
        format_args!(
            "<line x1=\"{:.1}\" y1=\"{:.1}\" x2=\"{:.1}\" y2=\"{:.1}\" stroke=\"{GRID}\"/>\n",
            from.0, from.1, to.0, to.1
        ),
    );
}

fn text(svg: &mut String, x: f64, y: f64, anchor: &str, size: f64, colour: &str, said: &str) {
    let said = escape(said);
    put(
        svg,
        format_args!(
            "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\" font-size=\"{size}\" \
             fill=\"{colour}\">{said}</text>\n"
        ),
    );
}

fn put(svg: &mut String, what: std::fmt::Arguments<'_>) {
    svg.write_fmt(what).expect("a String takes everything");
}

/// A tick's number, with the decimals that its step needs.
fn decimal(tick: f64, step: f64) -> String {
    let decimals = (-step.log10().floor()).max(0.0) as usize;
    let tick = if tick.abs() < step / 1e6 { 0.0 } else { tick };
    format!("{tick:.decimals$}").replace('-', "−")
}

fn escape(said: &str) -> String {
    said.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests;
