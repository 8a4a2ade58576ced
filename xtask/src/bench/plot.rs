//! Curves on paper, drawn by `plotters`.

use std::path::Path;

use anyhow::{Result, anyhow};
use plotters::coord::Shift;
use plotters::coord::ranged1d::{AsRangedCoord, Ranged, ValueFormatter};
use plotters::prelude::*;

const SIZE: (u32, u32) = (1060, 0);
const PANEL_HEIGHT: u32 = 380;
const PANEL_WIDTH: u32 = SIZE.0 / 2;
const LEGEND_ROW: i32 = 18;
const TITLE_HEIGHT: u32 = 64;
const INK: RGBColor = RGBColor(31, 41, 51);
const FAINT: RGBColor = RGBColor(97, 110, 124);
const GRID: RGBColor = RGBColor(228, 231, 235);
/// Told apart also by those who see fewer colours (Okabe and Ito, 2008).
const COLOURS: [RGBColor; 8] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(230, 159, 0),
    RGBColor(86, 180, 233),
    RGBColor(120, 94, 60),
    RGBColor(60, 60, 60),
];

/// Some panels over the same quantity, two in a row.
#[derive(Clone, Debug)]
pub struct Plot {
    /// Part of the file's name.
    pub name: String,
    /// The headline.
    pub title: String,
    /// What was measured, in a line.
    pub about: String,
    /// What is seen.
    pub panels: Vec<Panel>,
}

/// Curves over one quantity.
#[derive(Clone, Debug)]
pub struct Panel {
    /// What the values are, with their unit.
    pub y: Axis,
    /// What they are over, with its unit.
    pub x: Axis,
    /// At least one with at least one point.
    pub curves: Vec<Curve>,
}

/// A scale.
#[derive(Clone, Debug)]
pub struct Axis {
    label: String,
    kind: Kind,
}

#[derive(Clone, Debug)]
enum Kind {
    Linear,
    Log,
    Names(Vec<String>),
}

impl Axis {
    /// From zero up.
    pub fn linear(label: &str) -> Axis {
        Axis { label: label.to_owned(), kind: Kind::Linear }
    }

    /// Logarithmic. What is not above zero is left out.
    pub fn log(label: &str) -> Axis {
        Axis { label: label.to_owned(), kind: Kind::Log }
    }

    /// One place for each name; a point's value is the number of its name. Nothing is joined.
    pub fn names(label: &str, names: &[String]) -> Axis {
        Axis { label: label.to_owned(), kind: Kind::Names(names.to_vec()) }
    }

    fn is_log(&self) -> bool {
        matches!(self.kind, Kind::Log)
    }

    /// Its ends, with room around what there is.
    fn range(&self, values: impl Iterator<Item = f64>) -> (f64, f64) {
        let shown = values.filter(|value| !self.is_log() || *value > 0.0);
        let ends = |(least, most): (f64, f64), value: f64| (least.min(value), most.max(value));
        let (least, most) = shown.fold((f64::INFINITY, f64::NEG_INFINITY), ends);
        match &self.kind {
            Kind::Names(names) => (-0.5, names.len() as f64 - 0.5),
            _ if least > most => (1.0, 10.0),
            Kind::Linear => (0.0, if most > 0.0 { most * 1.06 } else { 1.0 }),
            // Whole decades: each has its line and its number.
            Kind::Log => {
                let decade = |value: f64| 10f64.powf(value);
                let (from, to) = (least.log10().floor(), most.log10().ceil());
                (decade(from), decade(if to > from { to } else { from + 1.0 }))
            }
        }
    }

    fn label_of(&self, value: f64) -> String {
        match &self.kind {
            Kind::Names(names) => {
                let whole = (value - value.round()).abs() < 1e-6;
                let name = names.get(value.round() as usize).filter(|_| whole && value > -0.5);
                name.cloned().unwrap_or_default()
            }
            Kind::Linear | Kind::Log => short(value),
        }
    }
}

/// A number in few characters: 20 k, 1.5 M.
fn short(value: f64) -> String {
    let (scaled, unit) = match value.abs() {
        v if v >= 0.9995e9 => (value / 1e9, " G"),
        v if v >= 0.9995e6 => (value / 1e6, " M"),
        v if v >= 0.9995e4 => (value / 1e3, " k"),
        _ => (value, ""),
    };
    let decimals = match scaled.abs() {
        v if v >= 10.0 || (v - v.round()).abs() < 1e-9 => 0,
        v if v >= 1.0 => 1,
        v if v >= 0.1 => 2,
        _ => 3,
    };
    format!("{scaled:.decimals$}{unit}")
}

/// Points in a colour.
#[derive(Clone, Debug)]
pub struct Curve {
    /// Its word in the legend.
    pub name: String,
    /// Where it goes through.
    pub points: Vec<(f64, f64)>,
}

impl Plot {
    /// Draws it into a file.
    pub fn draw(&self, path: &Path) -> Result<()> {
        let rows = self.panels.len().div_ceil(2) as u32;
        let legend = self.panels.iter().map(Panel::legend_height).max().unwrap_or(0);
        let size = (SIZE.0, TITLE_HEIGHT + rows * (PANEL_HEIGHT + legend));
        let paper = SVGBackend::new(path, size).into_drawing_area();
        self.put(&paper).map_err(|error| anyhow!("draw {}: {error}", path.display()))
    }

    fn put(&self, paper: &DrawingArea<SVGBackend<'_>, Shift>) -> Result<()> {
        paper.fill(&WHITE)?;
        let (head, body) = paper.split_vertically(TITLE_HEIGHT);
        let words = |size: f64, colour: &RGBColor| ("sans-serif", size).into_font().color(colour);
        head.draw(&Text::new(self.title.clone(), (16, 10), words(21.0, &INK)))?;
        head.draw(&Text::new(self.about.clone(), (16, 40), words(14.0, &FAINT)))?;
        let columns = self.panels.len().min(2);
        let places = body.split_evenly((self.panels.len().div_ceil(2), columns));
        for (panel, place) in self.panels.iter().zip(&places) {
            panel.put(place)?;
        }
        paper.present()?;
        Ok(())
    }
}

impl Panel {
    /// Where the words of the legend stand: over the curves, so that they hide none.
    fn legend(&self) -> Vec<(i32, i32)> {
        let most = PANEL_WIDTH as i32 - 30;
        let (mut x, mut y) = (0, 0);
        let place = |curve: &Curve| {
            // A sans-serif of 13 pixels is some 7 wide.
            let width = 28 + 7 * curve.name.chars().count() as i32;
            if x > 0 && x + width > most {
                (x, y) = (0, y + LEGEND_ROW);
            }
            let here = (x, y);
            x += width;
            here
        };
        self.curves.iter().map(place).collect()
    }

    /// Where the dots of a curve stand beside a name, so that those of another do not hide them.
    fn beside(&self, number: usize) -> f64 {
        const ROOM: f64 = 0.5;
        ROOM * ((number as f64 + 0.5) / self.curves.len() as f64 - 0.5)
    }

    fn legend_height(&self) -> u32 {
        self.legend().last().map_or(0, |(_, y)| (y + LEGEND_ROW) as u32 + 8)
    }

    fn put(&self, place: &DrawingArea<SVGBackend<'_>, Shift>) -> Result<()> {
        let (head, place) = place.split_vertically(self.legend_height());
        for ((number, curve), (x, y)) in self.curves.iter().enumerate().zip(self.legend()) {
            let colour = COLOURS[number % COLOURS.len()];
            let (x, y) = (x + 20, y + 8);
            head.draw(&Rectangle::new([(x, y - 1), (x + 12, y + 7)], colour.filled()))?;
            let words = ("sans-serif", 13).into_font().color(&INK);
            head.draw(&Text::new(curve.name.clone(), (x + 17, y - 4), words))?;
        }
        let place = &place;
        let points = || self.curves.iter().flat_map(|curve| &curve.points);
        let x = self.x.range(points().map(|point| point.0));
        let y = self.y.range(points().map(|point| point.1));
        match (self.x.is_log(), self.y.is_log()) {
            (true, true) => self.chart(place, (x.0..x.1).log_scale(), (y.0..y.1).log_scale()),
            (true, false) => self.chart(place, (x.0..x.1).log_scale(), y.0..y.1),
            (false, true) => self.chart(place, x.0..x.1, (y.0..y.1).log_scale()),
            (false, false) => self.chart(place, x.0..x.1, y.0..y.1),
        }
    }

    fn chart<X, Y>(&self, place: &DrawingArea<SVGBackend<'_>, Shift>, x: X, y: Y) -> Result<()>
    where
        X: AsRangedCoord<Value = f64>,
        Y: AsRangedCoord<Value = f64>,
        X::CoordDescType: Ranged<ValueType = f64> + ValueFormatter<f64>,
        Y::CoordDescType: Ranged<ValueType = f64> + ValueFormatter<f64>,
    {
        let mut chart = ChartBuilder::on(place)
            .margin(14)
            .margin_top(4)
            .x_label_area_size(46)
            .y_label_area_size(66)
            .build_cartesian_2d(x, y)?;
        let words = ("sans-serif", 13).into_font();
        let places = match &self.x.kind {
            Kind::Names(names) => names.len() * 2 + 1,
            Kind::Linear | Kind::Log => 9,
        };
        chart
            .configure_mesh()
            .x_desc(self.x.label.clone())
            .y_desc(self.y.label.clone())
            .x_labels(places)
            .y_labels(8)
            .x_label_formatter(&|value| self.x.label_of(*value))
            .y_label_formatter(&|value| self.y.label_of(*value))
            .label_style(words.clone().color(&FAINT))
            .axis_desc_style(words.clone().color(&INK))
            .bold_line_style(GRID)
            .light_line_style(TRANSPARENT)
            .axis_style(FAINT)
            .draw()?;
        let is_joined = !matches!(self.x.kind, Kind::Names(_));
        for (number, curve) in self.curves.iter().enumerate() {
            let colour = COLOURS[number % COLOURS.len()];
            let is_shown = |(x, y): &(f64, f64)| {
                (!self.x.is_log() || *x > 0.0) && (!self.y.is_log() || *y > 0.0)
            };
            let beside = if is_joined { 0.0 } else { self.beside(number) };
            let points = curve.points.iter().copied().filter(is_shown);
            let points: Vec<_> = points.map(|(x, y)| (x + beside, y)).collect();
            if is_joined {
                chart.draw_series(LineSeries::new(points.clone(), colour.stroke_width(2)))?;
            }
            let dots = points.iter().map(|point| Circle::new(*point, 4, colour.filled()));
            chart.draw_series(dots)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plot_names_its_axes_and_curves() {
        let curve =
            |name: &str| Curve { name: name.to_owned(), points: vec![(1.0, 20.0), (1e4, 0.0)] };
        let panel = Panel {
            x: Axis::log("threads"),
            y: Axis::log("pause, µs"),
            curves: vec![curve("p50"), curve("p99")],
        };
        let names = Axis::names("server", &["nginx".to_owned(), "redis".to_owned()]);
        let other = Panel { x: names, y: Axis::linear("ms"), curves: vec![curve("plain")] };
        let panels = vec![panel, other];
        let (title, about) = ("Pause over threads".to_owned(), "asleep".to_owned());
        let plot = Plot { name: "threads".to_owned(), title, about, panels };
        let dir = std::env::temp_dir().join(format!("hotspare-plot-{}.svg", std::process::id()));
        plot.draw(&dir).unwrap();
        let svg = std::fs::read_to_string(&dir).unwrap();
        std::fs::remove_file(&dir).unwrap();
        for word in ["Pause over threads", "asleep", "threads", "pause, µs", "p99", "nginx"] {
            assert!(svg.contains(word), "{word} is not in the plot");
        }
    }

    #[test]
    fn a_legend_that_is_too_wide_goes_on_in_the_next_row() {
        let curve = |name: &str| Curve { name: name.to_owned(), points: vec![(1.0, 1.0)] };
        let (x, y) = (Axis::linear("x"), Axis::linear("y"));
        let panel = |count: usize| Panel {
            x: x.clone(),
            y: y.clone(),
            curves: (0..count).map(|_| curve("Hotspare stop-and-copy")).collect(),
        };
        assert!(panel(2).legend().iter().all(|place| place.1 == 0));
        let rows: Vec<i32> = panel(5).legend().iter().map(|place| place.1 / LEGEND_ROW).collect();
        assert_eq!(rows, [0, 0, 1, 1, 2]);
        assert!(panel(5).legend_height() > panel(2).legend_height());
    }

    #[test]
    fn dots_at_a_name_stand_side_by_side() {
        let curve = Curve { name: String::new(), points: vec![] };
        let x = Axis::names("server", &["nginx".to_owned()]);
        let panel = |count: usize| Panel {
            x: x.clone(),
            y: Axis::linear("ms"),
            curves: vec![curve.clone(); count],
        };
        assert_eq!(panel(1).beside(0), 0.0);
        assert_eq!([0, 1].map(|number| panel(2).beside(number)), [-0.125, 0.125]);
    }

    #[test]
    fn numbers_are_short() {
        let all = [0.0, 0.25, 1.5, 20.0, 9_000.0, 20_000.0, 1_500_000.0];
        assert_eq!(all.map(short), ["0", "0.25", "1.5", "20", "9000", "20 k", "1.5 M"]);
    }
}
