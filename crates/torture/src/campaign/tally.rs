//! Many rounds in a table.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use super::{Kind, Round};
use crate::clock::millis;

/// Rounds of one sort of fault.
#[derive(Clone, Debug, Default)]
struct Row {
    rounds: u64,
    failed: u64,
    silences: Vec<Duration>,
    waits: Vec<Duration>,
    unprotected: Vec<Duration>,
    takeovers: u64,
    replies: u64,
    operations: u64,
    counts: [u64; 4],
}

/// What all rounds have shown.
#[derive(Clone, Debug, Default)]
pub struct Tally {
    rows: BTreeMap<Kind, Row>,
    voids: u64,
}

impl Tally {
    /// Adds a round.
    pub fn add(&mut self, round: &Round) {
        let row = self.rows.entry(round.kind).or_default();
        if !round.is_good() && round.is_void {
            self.voids += 1;
            return;
        }
        row.rounds += 1;
        row.failed += u64::from(!round.is_good());
        row.silences.push(round.seen.silence);
        row.waits.push(round.seen.wait);
        row.unprotected.push(round.unprotected);
        row.takeovers += round.takeovers;
        row.replies += round.seen.replies;
        row.operations += round.operations;
        let seen = &round.seen;
        let counts = [seen.resets, seen.errors, seen.lost, seen.duplicates];
        row.counts.iter_mut().zip(counts).for_each(|(sum, count)| *sum += count);
    }

    /// Rounds that were good, and rounds that were not.
    pub fn passed_and_failed(&self) -> (u64, u64) {
        let failed: u64 = self.rows.values().map(|row| row.failed).sum();
        let rounds: u64 = self.rows.values().map(|row| row.rounds).sum();
        (rounds - failed, failed)
    }
}

/// Median, 99 of 100, and the longest, in milliseconds.
fn three(spans: &[Duration]) -> String {
    let mut sorted = spans.to_vec();
    sorted.sort_unstable();
    let at = |part: f64| {
        let index = (sorted.len() as f64 * part).ceil() as usize;
        sorted.get(index.max(1) - 1).map_or(f64::NAN, |span| millis(*span))
    };
    format!("{:.0}/{:.0}/{:.0}", at(0.5), at(0.99), at(1.0))
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{:<20} {:>6} {:>6} {:>16} {:>16} {:>18} {:>9} {:>10} {:>8}  \
             resets errors lost duplicates",
            "ms: median/p99/max",
            "rounds",
            "failed",
            "silence",
            "longest wait",
            "protected again",
            "takeovers",
            "replies",
            "checked"
        )?;
        for (kind, row) in &self.rows {
            let [resets, errors, lost, duplicates] = row.counts;
            writeln!(
                f,
                "{:<20} {:>6} {:>6} {:>16} {:>16} {:>18} {:>9} {:>10} {:>8}  \
                 {resets:>6} {errors:>6} {lost:>4} {duplicates:>10}",
                kind.to_string(),
                row.rounds,
                row.failed,
                three(&row.silences),
                three(&row.waits),
                three(&row.unprotected),
                row.takeovers,
                row.replies,
                row.operations,
            )?;
        }
        match self.voids {
            0 => Ok(()),
            voids => writeln!(f, "{voids} rounds were void and are not counted"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn three_are_the_median_the_last_but_few_and_the_longest() {
        let spans: Vec<_> = (1..=200).rev().map(Duration::from_millis).collect();
        assert_eq!(three(&spans), "100/198/200");
        assert_eq!(three(&spans[..1]), "200/200/200");
    }
}
