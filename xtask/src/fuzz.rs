//! Damaged bytes against everything that reads the network.
//!
//! The targets in `hotspare` itself (the arbiter's record, settings, the stage of a rehearsal) are
//! a test of that crate: `HOTSPARE_FUZZ_SECONDS=3600 cargo test --release -p hotspare-node fuzz`.

use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::Args;
use hotspare_replica::fuzz::{Target, images, one, peers, run};

/// Who reads what the network brings.
const TARGETS: [(&str, Target); 7] = [
    ("stream", one),
    ("replies", peers::replies),
    ("greeting", peers::greeting),
    ("beats", peers::beats),
    ("images", images::images),
    ("packets", hotspare_net::fuzz::packets),
    ("manifests", hotspare_store::fuzz::manifests),
];

#[derive(Debug, Args)]
pub struct FuzzArguments {
    /// For how long each target, as in 60s, 10m, 1h
    #[arg(long = "for", default_value = "60s")]
    time: String,
    /// Only this one: stream, replies, greeting, beats, images, packets, manifests
    #[arg(long)]
    target: Option<String>,
    /// The first case; each case adds one
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Repeats the one case of this seed; needs --target
    #[arg(long, requires = "target")]
    case: Option<u64>,
}

fn duration(text: &str) -> Result<Duration> {
    let (number, unit) = text.split_at(text.len().saturating_sub(1));
    let seconds = match unit {
        "s" => 1,
        "m" => 60,
        "h" => 3600,
        _ => bail!("{text:?} needs a unit: s, m or h"),
    };
    let number: u64 = number.parse().with_context(|| format!("{text:?} is no time"))?;
    Ok(Duration::from_secs(number * seconds))
}

/// Runs the targets one after another; a failure panics and names target and seed.
pub fn fuzz(arguments: &FuzzArguments) -> Result<()> {
    let wanted = arguments.target.as_deref();
    let time = duration(&arguments.time)?;
    let mut targets =
        TARGETS.iter().filter(|(name, _)| wanted.is_none_or(|it| it == *name)).peekable();
    if targets.peek().is_none() {
        bail!("no such target; there are: {}", TARGETS.map(|(name, _)| name).join(", "));
    }
    let mut cases = 0;
    for (name, target) in targets {
        if let Some(case) = arguments.case {
            let (is_refused, believed) = target(case);
            println!("{name}, case {case}: refused {is_refused}, {believed} believed");
            continue;
        }
        let report = run(name, *target, arguments.seed, time);
        let (refused, believed) = (report.refused, report.committed);
        println!(
            "{name}: {} cases in {} s from seed {}, {refused} refused, {believed} believed",
            report.cases,
            time.as_secs(),
            arguments.seed
        );
        cases += report.cases;
    }
    println!("{cases} passed, 0 failed");
    Ok(())
}
