//! `--against REV`: two commits of ours, in turns, on the same machine in the same minutes.
//!
//! What the machine does for others changes by the minute, so figures of two runs of a suite say
//! little about what lies between them. Here each turn measures both commits, the one that begins
//! changing from turn to turn, and what counts is the ratio.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use hotspare_torture::dice::Dice;
use serde_json::json;

use super::report::{Common, Report, Table, wrapped};
use crate::call;
use crate::tree::{self, cargo};

/// Draws for the confidence interval.
const DRAWS: usize = 4000;
/// The same figures give the same interval.
const SEED: u64 = 2026;

/// What is measured by name; of each, less or more may be better.
pub type Figures = BTreeMap<String, f64>;

/// Measures a program `hotspare` once.
pub type Measure<'a> = Box<dyn Fn(&Path) -> Result<Figures> + 'a>;

/// Something that a program `hotspare` can be measured at.
pub struct Case<'a> {
    /// In words, for the table.
    pub name: String,
    /// How it is done.
    pub measure: Measure<'a>,
}

/// Both commits' figures of one turn.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Pair {
    theirs: f64,
    ours: f64,
}

/// Measures all cases with the program of this tree and of `rev`, and prints their ratios.
pub fn compare(suite: &'static str, common: &Common, rev: &str, cases: &[Case<'_>]) -> Result<()> {
    let mut report = Report::new(suite, common)?;
    let (ours, theirs) = (tree::build_hotspare()?, build(rev)?);
    let mut table =
        Table::new(&["case", "figure", rev, "this tree", "ratio", "95 % of draws", "turns"]);
    for case in cases {
        let mut pairs: BTreeMap<String, Vec<Pair>> = BTreeMap::new();
        for turn in 0..common.turns {
            let measure = |binary: &PathBuf| (case.measure)(binary).context(case.name.clone());
            let (before, after) = match turn % 2 {
                0 => (measure(&theirs)?, measure(&ours)?),
                _ => {
                    let after = measure(&ours)?;
                    (measure(&theirs)?, after)
                }
            };
            for (figure, theirs) in before {
                if let Some(ours) = after.get(&figure).copied() {
                    pairs.entry(figure).or_default().push(Pair { theirs, ours });
                }
            }
        }
        for (figure, pairs) in &pairs {
            let (before, after, ratio) = ratio(pairs);
            let (least, most) = interval(pairs);
            let of = json!({ "case": case.name, "figure": figure, "against": rev });
            let turns: Vec<[f64; 2]> = pairs.iter().map(|pair| [pair.theirs, pair.ours]).collect();
            report
                .add(of, &json!({ "turns": turns, "ratio": ratio, "from": least, "to": most }))?;
            table.row([
                case.name.clone(),
                figure.clone(),
                format!("{before:.1}"),
                format!("{after:.1}"),
                format!("{ratio:.3}"),
                format!("{least:.3} to {most:.3}"),
                pairs.len().to_string(),
            ]);
        }
    }
    let about = format!(
        "Medians of {} turns of each commit, and this tree's median divided by that of {rev}. The \
         interval: turns drawn with replacement {DRAWS} times (bootstrap), the middle 95 % of the \
         ratios. One that holds 1 shows no difference.",
        common.turns
    );
    println!("\n{}", wrapped(&about));
    report.finish(&format!("{suite} against {}", rev.replace('/', "-")), &table.text)
}

/// Builds the program of another commit in a work tree under `target/against`, and nothing of it
/// where this tree is built: to cargo both trees are one, and it would take theirs for ours then,
/// in whatever is built here later.
fn build(rev: &str) -> Result<PathBuf> {
    let git = |words: &[&str]| -> Result<String> {
        let output = Command::new("git").args(words).output().context("run git")?;
        let erred = String::from_utf8_lossy(&output.stderr).into_owned();
        ensure!(output.status.success(), "git {}: {erred}", words.join(" "));
        Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    let commit = git(&["rev-parse", "--verify", &format!("{rev}^{{commit}}")])
        .with_context(|| format!("find {rev}: name a commit, a branch or a tag"))?;
    let all = tree::target().join("against");
    let place = all.join("tree");
    let kept = all.join(format!("hotspare-{commit}"));
    if kept.is_file() {
        return Ok(kept);
    }
    if !place.join(".git").exists() {
        git(&["worktree", "prune"])?;
        git(&["worktree", "add", "--force", "--detach", &place.display().to_string(), &commit])?;
    }
    let path = place.display().to_string();
    git(&["-C", &path, "checkout", "--quiet", "--force", "--detach", &commit])?;
    println!("building {rev} ({})", commit.get(..9).unwrap_or(&commit));
    let mut build = cargo(&["build", "--quiet", "--release", "--bin", "hotspare"]);
    build.current_dir(&place).arg("--target-dir").arg(all.join("target"));
    call(build).with_context(|| format!("build {rev}"))?;
    let built = all.join("target/release/hotspare");
    std::fs::copy(&built, &kept).with_context(|| format!("keep {}", built.display()))?;
    Ok(kept)
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let half = values.len() / 2;
    match values.len() {
        0 => f64::NAN,
        count if count % 2 == 1 => values[half],
        _ => (values[half - 1] + values[half]) / 2.0,
    }
}

/// Medians of both and their ratio.
fn ratio(pairs: &[Pair]) -> (f64, f64, f64) {
    let before = median(pairs.iter().map(|pair| pair.theirs).collect());
    let after = median(pairs.iter().map(|pair| pair.ours).collect());
    (before, after, after / before)
}

/// Where 95 % of the ratios lie if turns are drawn with replacement (Efron: Bootstrap Methods,
/// 1979). Pairs are drawn whole: what slowed one commit in a turn slowed the other, too.
fn interval(pairs: &[Pair]) -> (f64, f64) {
    let mut dice = Dice::new(SEED);
    let mut draw = || {
        let drawn: Vec<Pair> =
            pairs.iter().map(|_| pairs[dice.below(pairs.len() as u64) as usize]).collect();
        ratio(&drawn).2
    };
    let mut ratios: Vec<f64> = (0..DRAWS).map(|_| draw()).collect();
    ratios.sort_by(f64::total_cmp);
    (ratios[DRAWS / 40], ratios[DRAWS - 1 - DRAWS / 40])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pairs(shift: f64) -> Vec<Pair> {
        let mut dice = Dice::new(1);
        let mut noisy = || 100.0 + dice.below(20) as f64;
        (0..20).map(|_| Pair { theirs: noisy(), ours: noisy() * shift }).collect()
    }

    #[test]
    fn a_median_is_in_the_middle() {
        assert_eq!(median(vec![3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(vec![4.0, 1.0, 2.0, 3.0]), 2.5);
        assert!(median(vec![]).is_nan());
    }

    #[test]
    fn an_interval_holds_one_only_if_nothing_has_changed() {
        let (least, most) = interval(&pairs(1.0));
        assert!(least <= 1.0 && most >= 1.0, "{least} to {most}");
        let (least, most) = interval(&pairs(0.5));
        assert!(least > 0.4 && most < 0.6, "{least} to {most}");
    }
}
