//! Everything that must pass before a change lands, in the order that finds most soonest.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use clap::Args;

use crate::guests::{self, GuestArguments};
use crate::kills::{self, KillArguments};
use crate::tree::cargo;
use crate::{bench, call, tidy, torture};

#[derive(Debug, Args)]
pub struct CiArguments {
    /// Only the checks that need neither root nor a kernel feature
    #[arg(long)]
    quick: bool,
}

/// Passed and failed tests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Count {
    passed: u64,
    failed: u64,
}

impl Count {
    fn add(&mut self, other: Count) {
        self.passed += other.passed;
        self.failed += other.failed;
    }
}

/// Of a suite: its tests, and what failed, a line each, as far as it says so.
#[derive(Debug, Default)]
struct Outcome {
    count: Count,
    failures: Vec<String>,
}

impl From<(u64, u64)> for Outcome {
    fn from((passed, failed): (u64, u64)) -> Self {
        Self { count: Count { passed, failed }, failures: Vec::new() }
    }
}

impl From<(u64, Vec<String>)> for Outcome {
    fn from((passed, failures): (u64, Vec<String>)) -> Self {
        Self { count: Count { passed, failed: failures.len() as u64 }, failures }
    }
}

struct Suite {
    name: &'static str,
    outcome: Outcome,
    seconds: f64,
    is_good: bool,
}

/// Runs all of it; the last line is `N passed, N failed`.
pub fn ci(arguments: &CiArguments) -> Result<()> {
    step("format", || call(cargo(&["fmt", "--all", "--check"])))?;
    step("tidy", tidy::tidy)?;
    let clippy = ["clippy", "--workspace", "--all-targets", "--release", "--", "-D", "warnings"];
    step("lint", || call(cargo(&clippy)))?;
    step("build", || call(cargo(&["build", "--release", "--workspace"])))?;

    let mut suites = Vec::new();
    let tests = ["test", "--release", "--workspace", "--no-fail-fast"];
    suites.push(suite("rust", &mut cargo(&tests))?);
    if !arguments.quick {
        for module in go_modules()? {
            let mut go = Command::new("go");
            go.args(["test", "-v", "./..."]).current_dir(module);
            suites.push(suite("go", &mut go)?);
        }
        let table = GuestArguments::default();
        suites.push(own_suite("guests", || guests::table(&table))?);
        let each_once = KillArguments::default();
        suites.push(own_suite("kills", || kills::all(&each_once))?);
        suites.push(own_suite("moves", || kills::all(&KillArguments::moves()))?);
        suites.push(own_suite("unnoticed", || kills::all(&KillArguments::unnoticed()))?);
        suites.push(own_suite("torture", torture::smoke)?);
        suites.push(own_suite("bench", || Ok(bench::quick()))?);
    }
    report(&suites)
}

fn report(suites: &[Suite]) -> Result<()> {
    let mut total = Count::default();
    println!();
    for suite in suites {
        for failure in &suite.outcome.failures {
            println!("{} failed: {failure}", suite.name);
        }
        let Count { passed, failed } = suite.outcome.count;
        println!(
            "{:<10} {passed:>6} passed {failed:>4} failed {:>7.1} s",
            suite.name, suite.seconds
        );
        total.add(suite.outcome.count);
    }
    let broken: Vec<_> = suites.iter().filter(|suite| !suite.is_good).collect();
    // A suite that broke without counting a failure still is one.
    let uncounted = broken.iter().filter(|suite| suite.outcome.count.failed == 0).count() as u64;
    println!("{} passed, {} failed", total.passed, total.failed + uncounted);
    ensure!(total.passed > 0, "no test ran");
    if !broken.is_empty() {
        let names: Vec<_> = broken.iter().map(|suite| suite.name).collect();
        bail!("failed: {}", names.join(", "));
    }
    Ok(())
}

fn step(name: &str, work: impl FnOnce() -> Result<()>) -> Result<()> {
    let start = Instant::now();
    work().with_context(|| name.to_owned())?;
    println!("== {name}: {:.1} s", start.elapsed().as_secs_f64());
    Ok(())
}

/// Runs a suite, passing its output on and counting its tests.
fn suite(name: &'static str, command: &mut Command) -> Result<Suite> {
    println!("== {name}");
    let start = Instant::now();
    let spawned = command.stdout(Stdio::piped()).spawn();
    let mut child = spawned.with_context(|| format!("run {command:?}"))?;
    let stdout = child.stdout.take().context("its output is piped")?;
    let mut outcome = Outcome::default();
    for line in BufReader::new(stdout).lines() {
        let line = line.with_context(|| format!("read the output of {name}"))?;
        outcome.count.add(counted(&line));
        outcome.failures.extend(failure(&line).map(str::to_owned));
        println!("{line}");
    }
    let is_good = child.wait().with_context(|| format!("wait for {name}"))?.success();
    Ok(Suite { name, outcome, seconds: start.elapsed().as_secs_f64(), is_good })
}

/// Runs a suite of our own.
fn own_suite<O: Into<Outcome>>(
    name: &'static str,
    work: impl FnOnce() -> Result<O>,
) -> Result<Suite> {
    println!("== {name}");
    let start = Instant::now();
    let outcome: Outcome = work().with_context(|| name.to_owned())?.into();
    let is_good = outcome.count.failed == 0;
    Ok(Suite { name, outcome, seconds: start.elapsed().as_secs_f64(), is_good })
}

/// The test that a line of cargo or go says failed.
fn failure(line: &str) -> Option<&str> {
    let cargo = line.strip_prefix("test ").and_then(|rest| rest.strip_suffix(" ... FAILED"));
    cargo.or_else(|| line.strip_prefix("--- FAIL: "))
}

/// The tests that a line of a test runner counts: `test result: ok. 3 passed; 0 failed; …` of
/// cargo, `N passed, N failed` of our own, `--- PASS:` of go.
fn counted(line: &str) -> Count {
    let before = |word: &str| -> Option<u64> {
        let (head, _) = line.split_once(word)?;
        head.trim_end().rsplit(' ').next()?.parse().ok()
    };
    if line.starts_with("--- PASS: ") {
        return Count { passed: 1, failed: 0 };
    }
    if line.starts_with("--- FAIL: ") {
        return Count { passed: 0, failed: 1 };
    }
    let is_ours = line.starts_with(|first: char| first.is_ascii_digit());
    match (before(" passed"), before(" failed")) {
        (Some(passed), Some(failed)) if is_ours || line.starts_with("test result: ") => {
            Count { passed, failed }
        }
        _ => Count::default(),
    }
}

/// Directories with a Go module that has tests.
fn go_modules() -> Result<Vec<std::path::PathBuf>> {
    let files = crate::tree::files()?;
    let is_module = |dir: &Path| {
        files.iter().any(|file| {
            file.starts_with(dir) && file.to_str().is_some_and(|name| name.ends_with("_test.go"))
        })
    };
    let modules = files.iter().filter(|file| file.file_name().is_some_and(|name| name == "go.mod"));
    let dirs = modules.filter_map(|file| file.parent()).map(Path::to_owned);
    Ok(dirs.filter(|dir| is_module(dir)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn closing_lines_of_test_runners_are_counted_once() {
        let cargo = "test result: FAILED. 5 passed; 2 failed; 0 ignored; 0 measured";
        assert_eq!(counted(cargo), Count { passed: 5, failed: 2 });
        assert_eq!(counted("12 passed, 0 failed"), Count { passed: 12, failed: 0 });
        assert_eq!(counted("--- FAIL: TestX (0.00s)"), Count { passed: 0, failed: 1 });
        assert_eq!(counted("what has passed has failed"), Count::default());
    }

    #[test]
    fn what_failed_is_named() {
        assert_eq!(failure("test road::it_holds ... FAILED"), Some("road::it_holds"));
        assert_eq!(failure("--- FAIL: TestX (0.00s)"), Some("TestX (0.00s)"));
        assert_eq!(failure("test road::it_holds ... ok"), None);
    }
}
