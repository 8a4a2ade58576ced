//! From what was measured to places on the paper.

/// A rectangle of the paper, in its units.
#[derive(Clone, Copy, Debug)]
pub(super) struct Plot {
    pub(super) left: f64,
    pub(super) top: f64,
    pub(super) width: f64,
    pub(super) height: f64,
}

impl Plot {
    pub(super) fn right(&self) -> f64 {
        self.left + self.width
    }

    pub(super) fn bottom(&self) -> f64 {
        self.top + self.height
    }

    pub(super) fn x(&self, axis: &Axis, value: f64) -> f64 {
        self.left + self.width * axis.place(value)
    }

    /// Greater values are higher up.
    pub(super) fn y(&self, axis: &Axis, value: f64) -> f64 {
        self.bottom() - self.height * axis.place(value)
    }
}

/// A scale.
#[derive(Clone, Copy, Debug)]
pub(super) struct Axis {
    from: f64,
    to: f64,
    is_log: bool,
}

impl Axis {
    pub(super) fn linear(from: f64, to: f64) -> Axis {
        Axis { from, to, is_log: false }
    }

    /// Logarithmic, from the power of ten at or below `least` to the one at or above `most`.
    pub(super) fn decades(least: f64, most: f64) -> Axis {
        let (from, to) = (10_f64.powf(least.log10().floor()), 10_f64.powf(most.log10().ceil()));
        Axis { from, to, is_log: true }
    }

    pub(super) fn from(&self) -> f64 {
        self.from
    }

    pub(super) fn to(&self) -> f64 {
        self.to
    }

    pub(super) fn span(&self) -> f64 {
        self.to - self.from
    }

    pub(super) fn holds(&self, value: f64) -> bool {
        (self.from..=self.to).contains(&value)
    }

    /// The powers of ten on it.
    pub(super) fn decade_values(&self) -> impl Iterator<Item = f64> + use<> {
        let exponent = |value: f64| value.log10().round() as i32;
        (exponent(self.from)..=exponent(self.to)).map(|exponent| 10_f64.powi(exponent))
    }

    /// 0.0 at the beginning, 1.0 at the end.
    fn place(&self, value: f64) -> f64 {
        let place = if self.is_log {
            (value / self.from).log10() / (self.to / self.from).log10()
        } else {
            (value - self.from) / (self.to - self.from)
        };
        place.clamp(0.0, 1.0)
    }
}

/// A power of ten of seconds in words.
pub(super) fn decade_label(seconds: f64) -> String {
    let (factor, unit) = match seconds {
        s if s < 0.9e-3 => (1e6, "µs"),
        s if s < 0.9 => (1e3, "ms"),
        _ => (1.0, "s"),
    };
    format!("{:.0} {unit}", seconds * factor)
}

/// The step among 1, 2, 5, 10, … that divides `span` in at most `most` pieces.
pub(super) fn step_for(span: f64, most: u32) -> f64 {
    let least = span / f64::from(most);
    let decade = 10_f64.powf(least.log10().floor());
    let steps = [1.0, 2.0, 5.0, 10.0];
    steps.map(|step| step * decade).into_iter().find(|step| *step >= least).unwrap_or(least)
}
