//! Campaigns of faults against a server whose clients must not notice any of them.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::Args;
use hotspare_torture::campaign::{Campaign, Kind, PROGRAMS, Plan, Tally};
use hotspare_torture::dice::Dice;
use hotspare_torture::lab::lock;
use hotspare_torture::programs::{build_examples, by_name, missing_commands};

use crate::pool::side_by_side;
use crate::{call, tree};

/// Rounds after which the lab is made anew, so that a guest does not live for hours.
const ROUNDS_A_LAB: usize = 40;

/// A broken gate has to be found out by then.
const BROKEN_AT_MOST: Duration = Duration::from_secs(60);

#[derive(Clone, Debug, Args)]
pub struct CampaignArguments {
    /// Kills of the primary
    #[arg(long, default_value_t = 0)]
    kills: u64,
    /// Kills of the spare
    #[arg(long, default_value_t = 0)]
    spare_kills: u64,
    /// Cut links: between the hosts and to the arbiter, both ways and one way
    #[arg(long, default_value_t = 0)]
    cuts: u64,
    /// Agents that stand still (SIGSTOP) for a while
    #[arg(long, default_value_t = 0)]
    stops: u64,
    /// Connections that are held
    #[arg(long, default_value_t = 200)]
    connections: usize,
    /// Connections that are made anew again and again, besides
    #[arg(long, default_value_t = 4)]
    callers: usize,
    /// Clients ask as hard as they can in all rounds
    #[arg(long)]
    saturated: bool,
    /// Only these programs
    #[arg(long = "program", value_name = "NAME")]
    programs: Vec<String>,
    /// Decides the seeds of all rounds, and their order
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Takes this very seed for every round, to repeat one
    #[arg(long)]
    exact_seed: Option<u64>,
    /// How many at once
    #[arg(long, default_value_t = 1)]
    jobs: usize,
    /// Milliseconds between two checkpoints
    #[arg(long, default_value_t = 100)]
    epoch_ms: u64,
    /// `--silence` of all agents, in milliseconds
    #[arg(long)]
    silence_ms: Option<u64>,
    /// Packets reach clients from the primary, not through the spare
    #[arg(long)]
    direct: bool,
    /// Begins no round after so many seconds
    #[arg(long)]
    seconds: Option<u64>,
    /// Builds a program whose gate lets replies out too early, and succeeds if the histories of
    /// Redis clients give it away within a minute
    #[arg(long)]
    broken_gate: bool,
    /// Gives up after so many failed rounds
    #[arg(long, default_value_t = 5)]
    failures: u64,
    /// Where the words of agents go when a round fails
    #[arg(long)]
    logs: Option<PathBuf>,
}

/// A program, and what it is to go through in one lab.
struct Leg {
    program: &'static str,
    rounds: Vec<(Kind, u64)>,
}

/// Does it and prints; the last line is `N passed, N failed`.
pub fn campaign(arguments: &CampaignArguments) -> Result<()> {
    if arguments.broken_gate {
        return broken_gate(arguments);
    }
    let tally = rounds(arguments)?;
    let (passed, failed) = tally.passed_and_failed();
    println!("\n{tally}");
    println!("{passed} passed, {failed} failed");
    ensure!(failed == 0 && passed > 0, "clients noticed {failed} rounds");
    Ok(())
}

fn rounds(arguments: &CampaignArguments) -> Result<Tally> {
    let binary = tree::build_hotspare()?;
    build_examples().context("build the examples")?;
    let mut plan = Plan::new(binary, arguments.logs());
    plan.epoch = Duration::from_millis(arguments.epoch_ms);
    plan.silence = arguments.silence_ms.map(Duration::from_millis);
    plan.connections = arguments.connections;
    plan.callers = arguments.callers;
    plan.is_saturated = arguments.saturated;
    if arguments.direct {
        plan.run_words = vec!["--path".to_owned(), "direct".to_owned()];
    }
    plan.checker = Some(build_checker()?);
    let legs = arguments.legs()?;
    println!("seed {}, logs of failures: {}", arguments.seed, plan.logs.display());
    run_legs(arguments, &plan, legs)
}

fn run_legs(arguments: &CampaignArguments, plan: &Plan, legs: Vec<Leg>) -> Result<Tally> {
    let begun = Instant::now();
    let tally = Mutex::new(Tally::default());
    let broken = Mutex::new(None);
    let is_over = || {
        let late = arguments.seconds.is_some_and(|most| begun.elapsed().as_secs() >= most);
        let failed = lock(&tally).passed_and_failed().1 >= arguments.failures;
        late || failed || lock(&broken).is_some()
    };
    side_by_side(arguments.jobs, legs, |leg| {
        let mut left: VecDeque<_> = leg.rounds.into();
        while !left.is_empty() && !is_over() {
            let number = left.len() as u64;
            let started = by_name(leg.program).context("a known program").and_then(|program| {
                let seed = Dice::new(arguments.seed).part(number).roll();
                Ok(Campaign::start(program, plan.clone(), seed)?)
            });
            let mut campaign = match started {
                Ok(campaign) => campaign,
                Err(error) => {
                    lock(&broken).get_or_insert(error.context("start a campaign"));
                    return;
                }
            };
            while let Some((kind, seed)) = left.pop_front().filter(|_| !is_over()) {
                let round = campaign.round(kind, seed);
                println!("{:>6.1} {round}", begun.elapsed().as_secs_f64());
                lock(&tally).add(&round);
                if !round.is_good() {
                    break;
                }
            }
        }
    });
    match broken.into_inner() {
        Ok(Some(error)) => Err(error),
        _ => Ok(tally.into_inner().unwrap_or_default()),
    }
}

/// Kills a primary with a broken gate until its histories make no sense.
fn broken_gate(arguments: &CampaignArguments) -> Result<()> {
    let (binary, checker) = (tree::build_hotspare_broken()?, build_checker()?);
    let mut plan = Plan::new(binary, arguments.logs().join("broken-gate"));
    plan.checker = Some(checker);
    plan.patience = Duration::from_secs(2);
    plan.connections = arguments.connections.min(20);
    plan.is_saturated = true;
    // A spare in the path has what clients said since the last checkpoint: it says it to the ghost
    // again, who mostly gives the same answers. So the way without it shows more.
    plan.run_words = vec!["--path".to_owned(), "direct".to_owned()];
    let (dice, begun) = (Dice::new(arguments.seed), Instant::now());
    let mut campaign = None;
    for number in 0.. {
        let late = begun.elapsed() > BROKEN_AT_MOST;
        ensure!(!late, "{number} kills, and no history gave the broken gate away");
        let program = || by_name("redis-server").context("a known program");
        let seed = dice.part(number).roll();
        let mut running: Campaign = match campaign.take() {
            Some(running) => running,
            None => Campaign::start(program()?, plan.clone(), seed)?,
        };
        let round = running.round(Kind::Kill, seed);
        let seconds = begun.elapsed().as_secs_f64();
        println!("{seconds:>6.1} {round}");
        if round.is_senseless {
            println!("the broken gate was found out after {seconds:.1} s, at kill {}", number + 1);
            return Ok(());
        }
        campaign = round.is_good().then_some(running);
    }
    Ok(())
}

impl CampaignArguments {
    fn logs(&self) -> PathBuf {
        self.logs.clone().unwrap_or_else(|| tree::target().join("campaign"))
    }

    /// All rounds in a random order, dealt out to the programs.
    fn legs(&self) -> Result<Vec<Leg>> {
        let dice = Dice::new(self.seed);
        let counts = [self.kills, self.spare_kills, self.cuts, self.stops];
        let kinds = Kind::ALL.iter().zip(counts);
        let mut kinds: Vec<Kind> =
            kinds.flat_map(|(kind, count)| (0..count).map(|_| *kind)).collect();
        ensure!(!kinds.is_empty(), "what is to happen? --kills, --spare-kills, --cuts, --stops");
        let mut shuffle = dice.part(u64::MAX);
        for last in (1..kinds.len()).rev() {
            kinds.swap(last, shuffle.below(last as u64 + 1) as usize);
        }
        let seed =
            |number: usize| self.exact_seed.unwrap_or_else(|| dice.part(number as u64).roll());
        let rounds: Vec<(Kind, u64)> =
            kinds.into_iter().enumerate().map(|(number, kind)| (kind, seed(number))).collect();
        let programs = self.chosen()?;
        let share = rounds.len().div_ceil(programs.len());
        let mut legs = Vec::new();
        for (program, rounds) in programs.iter().zip(rounds.chunks(share)) {
            let labs = rounds.chunks(ROUNDS_A_LAB);
            legs.extend(
                labs.enumerate()
                    .map(|(turn, rounds)| (turn, Leg { program, rounds: rounds.to_vec() })),
            );
        }
        // In turns, so that a campaign that is cut short has seen all programs.
        legs.sort_by_key(|(turn, _)| *turn);
        Ok(legs.into_iter().map(|(_, leg)| leg).collect())
    }

    fn chosen(&self) -> Result<Vec<&'static str>> {
        let known = |name: &String| {
            let known = PROGRAMS.iter().find(|known| known.starts_with(name.as_str()));
            known.copied().with_context(|| format!("no program {name}; there are {PROGRAMS:?}"))
        };
        let chosen = match self.programs.is_empty() {
            true => PROGRAMS.to_vec(),
            false => self.programs.iter().map(known).collect::<Result<_>>()?,
        };
        for name in &chosen {
            let program = by_name(name).context("a known program")?;
            let missing = missing_commands(&program);
            ensure!(missing.is_empty(), "{name} needs {missing:?}: run `make setup`");
        }
        Ok(chosen)
    }
}

/// Builds what tells whether a history is linearizable.
pub(crate) fn build_checker() -> Result<PathBuf> {
    let checker = tree::target().join("linearizable");
    let mut build = Command::new("go");
    build.args(["build", "-o"]).arg(&checker).arg(".");
    build.current_dir(tree::root().join("tools/linearizable"));
    call(build).context("build tools/linearizable (see scripts/setup)")?;
    Ok(checker)
}
