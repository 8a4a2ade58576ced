//! A server whose hosts die, are cut off and stand still again and again, while clients hold their
//! connections and check every reply.
//!
//! One lab lasts for many rounds. A round: a load, a random instant, a fault, all clients go on,
//! whoever was lost is replaced, the guest is protected again. Each has a seed of its own.

pub(crate) mod agents;
mod fault;
mod tally;
pub mod witness;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use self::agents::Agents;
use self::fault::{Fault, Undo};
use self::witness::Witnesses;
use crate::clients::Protocol;
use crate::clock::{Instant, millis};
use crate::dice::Dice;
use crate::fleet::{Crew, Fleet, Pace, Seen, StoreTalk, Talk, WebTalk};
use crate::lab::LabError;
use crate::programs::{Program, page};
use crate::protected::HANG;

pub use self::fault::Kind;
pub use self::tally::Tally;

/// The programs that campaigns know how to ask.
pub const PROGRAMS: [&str; 5] = ["redis-server", "memcached", "nginx", "lighttpd", "go-kv"];
/// The longest from the begin of a round to its fault.
const CALM_MAX: Duration = Duration::from_millis(600);

/// After a silence so long the words of agents are kept, too.
const LONG_SILENCE: Duration = Duration::from_secs(3);

/// How a campaign is done.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The `hotspare` program.
    pub binary: PathBuf,
    /// Those that the guest runs on in turns.
    pub hosts: usize,
    /// `timeline` or `output-commit`.
    pub guarantee: &'static str,
    /// All hosts hang on wires that can be disturbed.
    pub wires: bool,
    /// Each host has a disk of its own of this size.
    pub disk_bytes: Option<u64>,
    /// Agents can be short of memory and die at their kill points.
    pub is_strained: bool,
    /// Between two checkpoints.
    pub epoch: Duration,
    /// `--silence` of all agents, if not theirs.
    pub silence: Option<Duration>,
    /// More words of `hotspare run`.
    pub run_words: Vec<String>,
    /// Connections that are held.
    pub connections: usize,
    /// Connections that are made anew again and again, besides.
    pub callers: usize,
    /// All rounds are, not one of six.
    pub is_saturated: bool,
    /// No reply in this time is an error.
    pub patience: Duration,
    /// Tells whether the histories of a Redis are linearizable; without, there are none.
    pub checker: Option<PathBuf>,
    /// Where the words of agents go when a round fails.
    pub logs: PathBuf,
}

impl Plan {
    /// What the product promises, with this program.
    pub fn new(binary: PathBuf, logs: PathBuf) -> Plan {
        Plan {
            binary,
            hosts: 2,
            guarantee: "output-commit",
            wires: false,
            disk_bytes: None,
            is_strained: false,
            epoch: Duration::from_millis(100),
            silence: None,
            run_words: Vec::new(),
            connections: 200,
            callers: 4,
            is_saturated: false,
            patience: HANG,
            checker: None,
            logs,
        }
    }
}

/// What a round has shown.
#[derive(Clone, Debug)]
pub struct Round {
    /// The program's name.
    pub program: &'static str,
    /// Repeats it, as far as a machine with a clock can.
    pub seed: u64,
    /// What was done.
    pub kind: Kind,
    /// The same in words.
    pub fault: String,
    /// How hard clients asked.
    pub pace: Pace,
    /// What clients have seen.
    pub seen: Seen,
    /// From the fault until the guest was protected again.
    pub unprotected: Duration,
    /// Takeovers.
    pub takeovers: u64,
    /// Operations whose history was checked.
    pub operations: u64,
    /// Their history makes no sense in any order.
    pub is_senseless: bool,
    /// It proves nothing: the agents changed places by themselves in the same instant (a machine
    /// that stood still for longer than their patience), and the only host with the guest was hit.
    pub is_void: bool,
    /// Whatever else is wrong.
    pub wrongs: Vec<String>,
    /// Where logs are, if something is wrong or took long.
    pub logs: Option<PathBuf>,
}

impl Round {
    /// True if no client has noticed anything but time, and the guest is protected again.
    pub fn is_good(&self) -> bool {
        self.seen.is_good() && self.wrongs.is_empty()
    }
}

impl std::fmt::Display for Round {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let verdict = match (self.is_good(), self.is_void) {
            (true, _) => "ok",
            (false, true) => "void",
            (false, false) => "FAILED",
        };
        let (seen, program, seed) = (&self.seen, self.program, self.seed);
        write!(
            f,
            "{program:<12} seed {seed:<20} {verdict:<6} {} at {}: silence {:.0} ms, longest wait \
             {:.0} ms, {} replies, protected after {:.1} s",
            self.fault,
            self.pace,
            millis(seen.silence),
            millis(seen.wait),
            seen.replies,
            self.unprotected.as_secs_f64()
        )?;
        if self.takeovers != u64::from(self.kind == Kind::Kill) {
            write!(f, ", {} takeovers", self.takeovers)?;
        }
        for slow in &seen.slow {
            write!(f, "\n    slow: {slow}")?;
        }
        for wrong in seen.words.iter().chain(&self.wrongs) {
            write!(f, "\n    wrong: {wrong}")?;
        }
        if let Some(logs) = &self.logs {
            write!(f, "\n    logs: {}", logs.display())?;
        }
        Ok(())
    }
}

/// A lab in which rounds follow each other.
pub struct Campaign {
    program: Program,
    plan: Plan,
    // In this order: clients end before their lab does.
    witnesses: Option<Witnesses>,
    fleet: Fleet,
    agents: Agents,
}

impl Campaign {
    /// Starts hosts, the program, its spare and clients; returns when all of them are well.
    pub fn start(program: Program, plan: Plan, seed: u64) -> Result<Campaign, LabError> {
        let mut agents = Agents::start(&program, &plan)?;
        let fleet = Fleet::start(agents.lab.client(), crew_of(&program, &plan, &agents, seed));
        let waited = HANG;
        let what = |what: String| LabError::Deadline { what, waited };
        fleet.roll_call(HANG).map_err(|behind| what(format!("{behind} first replies")))?;
        let witnesses = plan.checker.as_ref().filter(|_| program.name == "redis-server");
        let witnesses = witnesses.map(|checker| {
            let client = agents.lab.client();
            Witnesses::start(client, agents.service, checker.clone(), plan.patience, seed)
        });
        agents.protect().map_err(what)?;
        Ok(Campaign { program, plan, witnesses, fleet, agents })
    }

    /// One round. After one that is not good, this campaign is of no more use.
    pub fn round(&mut self, kind: Kind, seed: u64) -> Round {
        let mut dice = Dice::new(seed);
        let pace = draw_pace(&mut dice, self.plan.is_saturated);
        let fault = Fault::draw(kind, &mut dice);
        let term = self.agents.term();
        // What happened before is not of this round.
        let before = self.fleet.take_seen();
        self.fleet.set_pace(pace);
        if let Some(witnesses) = &self.witnesses {
            witnesses.set_pace(pace);
        }
        let mut round = Round {
            program: self.program.name,
            seed,
            kind,
            fault: fault.to_string(),
            pace,
            seen: Seen::default(),
            unprotected: Duration::ZERO,
            takeovers: 0,
            operations: 0,
            is_senseless: false,
            is_void: false,
            wrongs: Vec::new(),
            logs: None,
        };
        (Instant::now() + dice.between(Duration::ZERO, CALM_MAX)).sleep_until();
        let happened = self.suffer(fault, &mut dice, &mut round);
        if let Err(wrong) = happened {
            round.wrongs.push(wrong);
        }
        self.fleet.probe(false);
        round.seen = self.fleet.take_seen();
        if !before.is_good() {
            before.words.iter().for_each(|word| round.wrongs.push(format!("before: {word}")));
        }
        round.takeovers = self.agents.term().saturating_sub(term);
        self.testify(&mut round);
        if !round.is_good() {
            round.is_void = self.agents.was_hit_alone(term);
        }
        if !round.is_good() || round.seen.silence > LONG_SILENCE {
            self.keep_logs(&mut round);
        }
        round
    }

    fn suffer(&mut self, fault: Fault, dice: &mut Dice, round: &mut Round) -> Result<(), String> {
        let in_words = |error: LabError| error.to_string();
        // They may have changed places since: whoever has the guest alone is not to be hit.
        self.agents.protect()?;
        self.fleet.probe(true);
        let (at, undo) = fault.strike(&mut self.agents).map_err(in_words)?;
        // Some ask in the midst of it; others long after, as if nothing had happened.
        if dice.chance(0.5) {
            self.all_go_on("in the midst of it")?;
        }
        if let (Some(span), true) = (fault.span(), undo != Undo::Nothing) {
            (at + span).sleep_until();
            undo.undo(&self.agents).map_err(in_words)?;
        }
        self.all_go_on("after it")?;
        self.agents.protect()?;
        round.unprotected = Instant::now().since(at);
        self.all_go_on("protected again")
    }

    fn all_go_on(&self, when: &str) -> Result<(), String> {
        self.fleet
            .roll_call(self.plan.patience + Duration::from_secs(2))
            .map_err(|behind| format!("{behind} connections have no reply, {when}"))
    }

    /// Adds what those have seen who share keys.
    fn testify(&mut self, round: &mut Round) {
        let Some(witnesses) = &mut self.witnesses else { return };
        let file = self.plan.logs.join(format!("history-{}", round.seed));
        let testimony = witnesses.testify(&file);
        round.operations = testimony.operations;
        round.is_senseless = testimony.is_senseless;
        for words in testimony.resets {
            round.seen.reset(words);
        }
        round.wrongs.extend(testimony.wrongs);
    }

    fn keep_logs(&self, round: &mut Round) {
        let dir = self.plan.logs.join(format!("{}-{}", round.program, round.seed));
        match self.agents.keep_logs(&dir) {
            Ok(()) => round.logs = Some(dir),
            Err(error) => round.wrongs.push(format!("the logs cannot be kept: {error}")),
        }
    }
}

/// The clients of a plan.
pub(crate) fn crew_of(program: &Program, plan: &Plan, agents: &Agents, seed: u64) -> Crew {
    let dice = Dice::new(seed);
    let talks = |prefix: &str, count: usize| -> Vec<Box<dyn Talk>> {
        let dice = dice.part(prefix.len() as u64);
        let talk =
            |number: usize| talk_to(program, format!("{prefix}{number}"), dice.part(number as u64));
        (0..count).map(talk).collect()
    };
    Crew {
        server: agents.service,
        held: talks("held", plan.connections),
        callers: talks("caller", plan.callers),
        patience: plan.patience,
        seed,
    }
}

/// How hard clients ask in a round.
pub(crate) fn draw_pace(dice: &mut Dice, is_saturated: bool) -> Pace {
    match dice.below(6) {
        _ if is_saturated => Pace::Saturated,
        0 => Pace::PerSecond(0),
        1 => Pace::PerSecond(20),
        2 => Pace::PerSecond(200),
        3 => Pace::PerSecond(1000),
        4 => Pace::PerSecond(3000),
        _ => Pace::Saturated,
    }
}

/// What a client says to a program.
fn talk_to(program: &Program, name: String, dice: Dice) -> Box<dyn Talk> {
    let store = |protocol| Box::new(StoreTalk::new(protocol, name, dice.clone()));
    match program.name {
        "redis-server" => store(Protocol::Redis),
        "memcached" => store(Protocol::Memcached),
        "go-kv" => store(Protocol::Line),
        _ => {
            let counts = program.name == "nginx";
            Box::new(WebTalk::new("/page", Arc::new(page()), counts, dice))
        }
    }
}
