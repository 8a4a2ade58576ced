//! What many scenarios have shown, by the sort of fault.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use hotspare_torture::clock::millis;
use hotspare_torture::scenario::Report;

/// Injections of one sort.
#[derive(Clone, Debug, Default)]
struct Row {
    injections: u64,
    /// Times that one was seen to do harm.
    harm: u64,
    silences: Vec<Duration>,
    waits: Vec<Duration>,
    unprotected: Vec<Duration>,
}

/// All of them.
#[derive(Clone, Debug, Default)]
pub struct Tally {
    rows: BTreeMap<&'static str, Row>,
    passed: u64,
    failed: u64,
    voids: u64,
    replies: u64,
    operations: u64,
    takeovers: u64,
}

impl Tally {
    /// Adds a run.
    pub fn add(&mut self, report: &Report) {
        if !report.is_good() && report.is_void {
            self.voids += 1;
            return;
        }
        self.passed += u64::from(report.is_good());
        self.failed += u64::from(!report.is_good());
        self.replies += report.seen.replies;
        self.operations += report.operations;
        self.takeovers += report.takeovers;
        for injection in &report.injections {
            let row = self.rows.entry(injection.strike.what.kind()).or_default();
            row.injections += 1;
            row.harm += injection.count;
            if let Some(seen) = &injection.seen {
                row.silences.push(seen.silence);
                row.waits.push(seen.wait);
            }
            row.unprotected.extend(injection.unprotected);
        }
    }

    /// Scenarios that held their invariants, and those that did not.
    pub fn passed_and_failed(&self) -> (u64, u64) {
        (self.passed, self.failed)
    }
}

/// Median, 99 of 100, and the longest, in milliseconds.
fn three(spans: &[Duration]) -> String {
    let mut sorted = spans.to_vec();
    sorted.sort_unstable();
    let at = |part: f64| {
        let index = (sorted.len() as f64 * part).ceil() as usize;
        sorted.get(index.max(1) - 1).map(|span| millis(*span))
    };
    match (at(0.5), at(0.99), at(1.0)) {
        (Some(half), Some(most), Some(all)) => format!("{half:.0} / {most:.0} / {all:.0}"),
        _ => "-".to_owned(),
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "| fault | injections | proofs | silence, ms: median / p99 / longest | longest wait | \
             protected again |\n| --- | --- | --- | --- | --- | --- |"
        )?;
        for (kind, row) in &self.rows {
            let (silences, waits) = (three(&row.silences), three(&row.waits));
            let (injections, harm, again) = (row.injections, row.harm, three(&row.unprotected));
            writeln!(f, "| {kind} | {injections} | {harm} | {silences} | {waits} | {again} |")?;
        }
        let (replies, operations, takeovers) = (self.replies, self.operations, self.takeovers);
        write!(
            f,
            "{} scenarios held, {} did not, {} were void; {takeovers} takeovers, {replies} \
             replies, {operations} operations in histories",
            self.passed, self.failed, self.voids
        )
    }
}
