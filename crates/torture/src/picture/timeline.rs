//! A picture of a whole scenario: the longest wait of each moment as dots, faults as bars below.

use super::axis::{Axis, Plot, decade_label, step_for};
use super::{BAD, FAINT, GOOD, GRID, INK, SHADE, decimal, escape, line, put, text};
use crate::clock::Instant;
use crate::fleet::Mark;

const WIDTH: f64 = 1200.0;
const MAIN: Plot = Plot { left: 90.0, top: 92.0, width: 1080.0, height: 300.0 };
const RATE: Plot = Plot { left: 90.0, top: 432.0, width: 1080.0, height: 70.0 };
const LANES_TOP: f64 = 538.0;
const LANE: f64 = 30.0;
const BLOW: &str = "#c81e1e";
const WEATHER: &str = "#f0b429";

/// A fault.
#[derive(Clone, Debug)]
pub struct Span {
    /// When it began.
    pub from: Instant,
    /// When it ended.
    pub to: Instant,
    /// When the guest was protected again, if it had to be.
    pub well: Option<Instant>,
    /// What it was.
    pub words: String,
    /// Faults of a lane are alike.
    pub lane: usize,
}

/// What is to be seen.
#[derive(Clone, Debug)]
pub struct Timeline {
    /// The headline.
    pub title: String,
    /// A line below it.
    pub subtitle: String,
    /// Second 0.
    pub begin: Instant,
    /// What was done.
    pub faults: Vec<Span>,
    /// When spares took over.
    pub takeovers: Vec<Instant>,
    /// Replies over time.
    pub replies: Vec<Mark>,
}

impl Timeline {
    /// Draws it.
    pub fn svg(&self) -> String {
        let mut svg = String::new();
        let lanes = self.lanes();
        let height = LANES_TOP + LANE * lanes.len().max(1) as f64 + 24.0;
        let time = self.time();
        self.head(&mut svg, height);
        self.takeovers(&mut svg, &time, height);
        self.waits(&mut svg, &time);
        self.rates(&mut svg, &time);
        for (row, lane) in lanes.iter().enumerate() {
            self.lane(&mut svg, &time, row, *lane);
        }
        svg.push_str("</svg>\n");
        svg
    }

    fn seconds(&self, at: Instant) -> f64 {
        (at.0 as f64 - self.begin.0 as f64) / 1e9
    }

    fn time(&self) -> Axis {
        let ends = self.faults.iter().map(|span| span.well.unwrap_or(span.to));
        let ends = ends.chain(self.replies.last().map(|mark| mark.at));
        let end = ends.map(|at| self.seconds(at)).fold(1.0, f64::max);
        Axis::linear(0.0, end)
    }

    fn lanes(&self) -> Vec<usize> {
        let mut lanes: Vec<usize> = self.faults.iter().map(|span| span.lane).collect();
        lanes.sort_unstable();
        lanes.dedup();
        lanes
    }

    fn head(&self, svg: &mut String, height: f64) {
        let (title, subtitle) = (escape(&self.title), escape(&self.subtitle));
        put(
            svg,
            format_args!(
                "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" \
                 width=\"{WIDTH}\" height=\"{height}\" font-family=\"system-ui, 'Segoe UI', \
                 'DejaVu Sans', Helvetica, Arial, sans-serif\">\n\
                 <rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n\
                 <text x=\"24\" y=\"34\" font-size=\"20\" font-weight=\"600\" \
                 fill=\"{INK}\">{title}</text>\n\
                 <text x=\"24\" y=\"58\" font-size=\"14\" fill=\"{FAINT}\">{subtitle}</text>\n"
            ),
        );
    }

    fn takeovers(&self, svg: &mut String, time: &Axis, height: f64) {
        let (top, bottom) = (MAIN.top, height - 20.0);
        for at in self.takeovers.iter().filter(|at| time.holds(self.seconds(**at))) {
            let x = MAIN.x(time, self.seconds(*at));
            put(
                svg,
                format_args!(
                    "<line x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{top}\" y2=\"{bottom:.1}\" \
                     stroke=\"{FAINT}\" stroke-dasharray=\"2 3\"/>\n"
                ),
            );
        }
        let (right, y) = (MAIN.right(), MAIN.top - 10.0);
        text(svg, right, y, "end", 12.0, FAINT, "dotted: a spare took over");
    }

    /// The longest wait in each hundredth of a second that had a reply.
    fn waits(&self, svg: &mut String, time: &Axis) {
        let waits = self.replies.iter().map(|mark| mark.wait.as_secs_f64());
        let (least, most) = waits
            .fold((1e-3_f64, 1e-1_f64), |(least, most), wait| (least.min(wait), most.max(wait)));
        let axis = Axis::decades(least.max(1e-5), most);
        for decade in axis.decade_values() {
            let y = MAIN.y(&axis, decade);
            line(svg, (MAIN.left, y), (MAIN.right(), y));
            text(svg, MAIN.left - 8.0, y + 4.0, "end", 12.0, FAINT, &decade_label(decade));
        }
        let spot = |mark: &Mark| {
            let x = MAIN.x(time, self.seconds(mark.at));
            let y = MAIN.y(&axis, mark.wait.as_secs_f64().max(1e-5));
            time.holds(self.seconds(mark.at)).then(|| format!("M{x:.1} {y:.1}h0"))
        };
        let path: String = self.replies.iter().filter_map(spot).collect();
        put(
            svg,
            format_args!(
                "<path d=\"{path}\" stroke=\"{GOOD}\" stroke-opacity=\"0.5\" stroke-width=\"3\" \
                 stroke-linecap=\"round\" fill=\"none\"/>\n"
            ),
        );
        text(svg, 24.0, MAIN.top - 4.0, "start", 13.0, INK, "longest wait of a request");
    }

    /// Replies a second, in steps.
    fn rates(&self, svg: &mut String, time: &Axis) {
        let steps = 270;
        let step = time.span() / f64::from(steps);
        let mut counts = vec![0_u64; steps as usize];
        for mark in &self.replies {
            let at = self.seconds(mark.at);
            if let Some(count) = counts.get_mut((at / step).max(0.0) as usize)
                && at >= 0.0
            {
                *count += mark.replies;
            }
        }
        let most = counts.iter().copied().max().unwrap_or(0).max(1) as f64;
        let axis = Axis::linear(0.0, most);
        let (bottom, width) = (RATE.bottom(), RATE.width / f64::from(steps));
        let bar = |(number, count): (usize, &u64)| {
            let (x, y) = (RATE.left + number as f64 * width, RATE.y(&axis, *count as f64));
            format!("M{x:.1} {bottom}V{y:.1}h{width:.2}V{bottom}z")
        };
        let path: String = counts.iter().enumerate().map(bar).collect();
        put(svg, format_args!("<path d=\"{path}\" fill=\"{GOOD}\" fill-opacity=\"0.45\"/>\n"));
        text(svg, 24.0, RATE.top - 8.0, "start", 13.0, INK, "replies");
        let words = format!("{:.0}/s", most / step);
        text(svg, RATE.left - 8.0, RATE.top + 6.0, "end", 12.0, FAINT, &words);
        let step = step_for(time.span(), 12);
        let mut tick = 0.0;
        while tick <= time.to() + 1e-9 {
            let x = RATE.x(time, tick);
            text(svg, x, bottom + 16.0, "middle", 12.0, FAINT, &decimal(tick, step));
            tick += step;
        }
        text(svg, RATE.left - 8.0, bottom + 16.0, "end", 12.0, FAINT, "s");
    }

    fn lane(&self, svg: &mut String, time: &Axis, row: usize, lane: usize) {
        let top = LANES_TOP + LANE * row as f64;
        let mut words = None;
        let (left, right) = (MAIN.left, MAIN.right());
        put(
            svg,
            format_args!(
                "<line x1=\"{left}\" x2=\"{right}\" y1=\"{top}\" y2=\"{top}\" \
                 stroke=\"{GRID}\"/>\n"
            ),
        );
        for span in self.faults.iter().filter(|span| span.lane == lane) {
            words.get_or_insert(&span.words);
            let x = |at: Instant| MAIN.x(time, self.seconds(at).clamp(0.0, time.to()));
            let (from, to) = (x(span.from), x(span.to).max(x(span.from) + 2.0));
            if let Some(well) = span.well {
                bar(svg, (from, x(well)), top + 15.0, SHADE, &span.words);
            }
            let colour = if span.well.is_some() { BLOW } else { WEATHER };
            bar(svg, (from, to), top + 15.0, colour, &span.words);
        }
        let words = words.map_or("", String::as_str);
        let colour = if words.contains("FAILED") { BAD } else { FAINT };
        text(svg, left, top + 12.0, "start", 11.0, colour, words);
    }
}

fn bar(svg: &mut String, (from, to): (f64, f64), top: f64, colour: &str, words: &str) {
    let (width, words) = ((to - from).max(1.0), escape(words));
    put(
        svg,
        format_args!(
            "<rect x=\"{from:.1}\" y=\"{top:.1}\" width=\"{width:.1}\" height=\"10\" \
             fill=\"{colour}\"><title>{words}</title></rect>\n"
        ),
    );
}
