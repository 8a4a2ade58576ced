//! The text format of Prometheus, 0.0.4
//! (<https://prometheus.io/docs/instrumenting/exposition_formats/>).

use std::fmt::Write;

use super::Histogram;

/// What is answered, as it grows.
#[derive(Debug, Default)]
pub struct Page(pub String);

impl Page {
    /// Begins a metric.
    pub fn head(&mut self, name: &str, kind: &str, help: &str) {
        // Writing to a string cannot fail.
        let _ = writeln!(self.0, "# HELP {name} {help}\n# TYPE {name} {kind}");
    }

    /// A value of the metric that was begun.
    pub fn value(&mut self, name: &str, labels: &[(&str, &str)], value: f64) {
        self.0.push_str(name);
        self.labels(labels);
        let _ = writeln!(self.0, " {value}");
    }

    /// A histogram of the metric that was begun.
    pub fn histogram(&mut self, name: &str, label: Option<(&str, &str)>, from: &Histogram) {
        let bucket = format!("{name}_bucket");
        let own: Vec<(&str, &str)> = label.into_iter().collect();
        let mut below = 0;
        for (at, counter) in from.counts.iter().enumerate() {
            below += counter.get();
            let bound = from.bounds.get(at).map_or_else(
                || "+Inf".to_owned(),
                // Not by the unit's inexact value, or 0.00025 is 0.00025000000000000006.
                |bound| (*bound as f64 / (1.0 / from.unit).round()).to_string(),
            );
            self.value(&bucket, &[&own[..], &[("le", &bound)]].concat(), below as f64);
        }
        self.value(&format!("{name}_sum"), &own, from.sum.get() as f64 * from.unit);
        self.value(&format!("{name}_count"), &own, below as f64);
    }

    fn labels(&mut self, labels: &[(&str, &str)]) {
        for (at, (name, value)) in labels.iter().enumerate() {
            self.0.push(if at == 0 { '{' } else { ',' });
            let _ = write!(self.0, "{name}=\"");
            for letter in value.chars() {
                match letter {
                    '\\' => self.0.push_str("\\\\"),
                    '"' => self.0.push_str("\\\""),
                    '\n' => self.0.push_str("\\n"),
                    other => self.0.push(other),
                }
            }
            self.0.push('"');
        }
        if !labels.is_empty() {
            self.0.push('}');
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_label_may_hold_anything() {
        let mut page = Page::default();
        page.head("x", "gauge", "Help.");
        page.value("x", &[("guest", "a\"b\\c\nd"), ("n", "1")], 1.5);
        let expected = "# HELP x Help.\n# TYPE x gauge\nx{guest=\"a\\\"b\\\\c\\nd\",n=\"1\"} 1.5\n";
        assert_eq!(page.0, expected);
    }
}
