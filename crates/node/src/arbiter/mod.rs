//! The arbiter: who may speak for a guest, decided by a register that both hosts can reach.
//!
//! The rule is `hotspare_cluster::register`; here it meets the network. One thread with a small
//! asynchronous runtime carries out what the brain wants, one wish after another, and on a spare
//! watches the record, so that the wait for somebody's lease runs from his last renewal.
//!
//! A swap whose answer did not come may have happened. Nothing is answered before the record has
//! been read again.

mod etcd;
mod place;
pub mod record;
mod s3;

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use hotspare_cluster::register::{Record, Terms, Verdict, Wish, judge};
use hotspare_cluster::{Claim, Event};
use hotspare_image::{NodeId, Term};
use hotspare_net::lease::{Lease, boot_ns};
use tokio::runtime::Runtime;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

pub use self::place::Place;
use crate::agent::{Agent, Message};
use crate::report::Reporter;
use crate::settings::Settings;

/// Of a holder whose heirs acknowledge, if the lease is not longer.
const GRACE: Duration = Duration::from_secs(60);
/// Least and most that one request may take.
const REQUEST: (Duration, Duration) = (Duration::from_millis(300), Duration::from_secs(5));
/// After a request that failed.
const AGAIN: Duration = Duration::from_millis(50);
/// How long the last wish before the end of the program may take.
const LAST_WISH: Duration = Duration::from_secs(1);

/// What a register holds, and the name of this state of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stored {
    version: Version,
    bytes: Vec<u8>,
}

/// One state of a register: a revision, an entity tag.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Version(String);

/// Why an arbiter did not do as asked.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Trouble {
    /// It may be better the next time.
    #[error("{0}")]
    Unreachable(String),
    /// It will not be better by itself.
    #[error("{0}")]
    Refused(String),
    /// The record is not one of ours.
    #[error("{0}")]
    Corrupt(String),
}

enum Register {
    Etcd(Box<etcd::Etcd>),
    S3(s3::S3),
}

impl Register {
    async fn read(&self, key: &str) -> Result<Option<Stored>, Trouble> {
        match self {
            Register::Etcd(etcd) => etcd.read(key).await,
            Register::S3(s3) => s3.read(key).await,
        }
    }

    async fn swap(
        &self,
        key: &str,
        expected: Option<&Version>,
        bytes: Vec<u8>,
    ) -> Result<Option<Version>, Trouble> {
        match self {
            Register::Etcd(etcd) => etcd.swap(key, expected, bytes).await,
            Register::S3(s3) => s3.swap(key, expected, bytes).await,
        }
    }
}

/// What is known of the record.
#[derive(Default)]
struct Seen {
    /// False before it was read, and when it may be another by now.
    known: bool,
    version: Option<Version>,
    record: Option<Record>,
    /// When this version was first seen, by [`boot_ns`].
    since: u64,
    /// Our own writes so far: what was read before one may be older.
    writes: u64,
}

/// A swap that may have happened.
struct Attempt {
    record: Record,
    sent: u64,
}

/// An arbiter before its thread runs.
pub struct Arbiter {
    runtime: Runtime,
    register: Rc<Register>,
    prefix: String,
    lease: Duration,
    asks: UnboundedReceiver<Ask>,
    handle: Handle,
}

enum Ask {
    /// It is about this guest.
    Guest(String, Holds),
    Wish(Wish),
    /// The last wish, and somebody who waits for it.
    Last(Wish, SyncSender<bool>),
}

/// What is held back of a guest, and what is not.
#[derive(Clone, Copy, Debug, Default)]
pub struct Holds {
    /// Its output waits for all heirs.
    pub at_once: bool,
    /// It writes where others see it at once.
    pub shared: bool,
}

impl Holds {
    /// Of a guest with these settings.
    pub fn of(settings: &Settings) -> Self {
        let shared = settings.writes_shared_files();
        Self { at_once: settings.guarantee.is_exact(), shared }
    }
}

/// How others talk to the arbiter's thread.
#[derive(Clone)]
pub struct Handle {
    asks: UnboundedSender<Ask>,
    /// Our right to speak for the guest.
    pub lease: Arc<Lease>,
    /// Which arbiter it is.
    pub identity: String,
}

impl Handle {
    /// Wants something of the record; answered with an event.
    pub fn wish(&self, wish: Wish) {
        // The thread lives as long as the program.
        let _ = self.asks.send(Ask::Wish(wish));
    }

    /// From now on it is about this guest.
    pub fn guest(&self, name: &str, holds: Holds) {
        let _ = self.asks.send(Ask::Guest(name.to_owned(), holds));
    }

    /// Gives the term up, and waits for that a moment; whether the arbiter knows of it. The guest
    /// may have `ended`: then nobody inherits it, and its last words may leave while the lease
    /// lasts.
    pub fn give_up(&self, term: Term, ended: bool) -> bool {
        let (done, answer) = sync_channel(1);
        if !ended {
            self.lease.end();
        }
        let _ = self.asks.send(Ask::Last(Wish::GiveUp { term, ended }, done));
        answer.recv_timeout(LAST_WISH).unwrap_or(false)
    }
}

impl Arbiter {
    /// Finds the arbiter and sees that it answers. `None` if there is none.
    pub fn open(place: &Place, lease: Option<Duration>) -> anyhow::Result<Option<Self>> {
        let Some(identity) = place.identity() else { return Ok(None) };
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_all().build().context("tokio")?;
        let (register, prefix, usual) = {
            let _inside = runtime.enter();
            match place {
                Place::None => return Ok(None),
                Place::Etcd(place) => {
                    let prefix = format!("/{}", place.prefix);
                    let etcd = etcd::Etcd::new(place.clone(), REQUEST.1)?;
                    (Register::Etcd(Box::new(etcd)), prefix, Duration::from_secs(1))
                }
                Place::S3(place) => {
                    let s3 = s3::S3::new(place)?;
                    (Register::S3(s3), place.prefix.clone(), Duration::from_secs(10))
                }
            }
        };
        let length = lease.unwrap_or(usual);
        let (asks, asked) = unbounded_channel();
        let handle = Handle { asks, lease: Arc::new(Lease::new(length)), identity };
        let register = Rc::new(register);
        let arbiter = Self { runtime, register, prefix, lease: length, asks: asked, handle };
        arbiter.runtime.block_on(arbiter.check()).context("the arbiter cannot be used")?;
        Ok(Some(arbiter))
    }

    async fn check(&self) -> Result<(), Trouble> {
        match &*self.register {
            Register::S3(s3) => s3.check(&format!("{}/.probe", self.prefix)).await,
            Register::Etcd(etcd) => {
                let deadline = Instant::now() + REQUEST.1;
                loop {
                    match bounded(REQUEST.1, etcd.read(&format!("{}/", self.prefix))).await {
                        Err(Trouble::Unreachable(_)) if Instant::now() < deadline => {
                            etcd.try_another();
                            tokio::time::sleep(AGAIN).await;
                        }
                        answer => return answer.map(drop),
                    }
                }
            }
        }
    }

    /// How others talk to it.
    pub fn handle(&self) -> Handle {
        self.handle.clone()
    }

    /// Takes a term for a guest that is about to be started, and waits out the lease of whoever
    /// had it before.
    pub fn take_first(
        &self,
        node: NodeId,
        guest: &str,
        holds: Holds,
        reporter: &Reporter,
    ) -> anyhow::Result<Term> {
        let (register, prefix) = (Rc::clone(&self.register), self.prefix.clone());
        let desk = Desk::new(register, prefix, node, Arc::clone(&self.handle.lease), self.lease);
        desk.set_guest(guest, holds);
        self.handle.guest(guest, holds);
        self.runtime.block_on(async {
            let mut waited_for = None;
            let mut term = Term(1);
            loop {
                let wish = Wish::Take { term, by: Claim::First };
                match desk
                    .settle(&wish, &|_| true)
                    .await
                    .context("ask the arbiter for the first term")?
                {
                    Outcome::Granted(_) => return Ok(term),
                    Outcome::Denied { held, .. } if term <= held => term = held.next(),
                    Outcome::Denied { held, retry_at } => {
                        let version = desk.seen.borrow().version.clone();
                        if waited_for.as_ref().is_some_and(|before| *before != version) {
                            bail!(
                                "the guest {guest:?} runs on another host (term {held}, whose \
                                 holder renews it): start `hotspare spare` here to protect it, or \
                                 give this guest another name with --guest"
                            );
                        }
                        let wait = retry_at.map_or(self.lease, |at| {
                            Duration::from_nanos(at.saturating_sub(boot_ns()))
                        });
                        if waited_for.replace(version).is_none() {
                            reporter.note(&format!(
                                "the arbiter has term {held} of {guest:?} on another host, or of \
                                 an earlier run: waiting {:.1} s for the end of its lease",
                                wait.as_secs_f64()
                            ));
                        }
                        tokio::time::sleep(wait.min(Duration::from_secs(1))).await;
                        desk.seen.borrow_mut().known = false;
                    }
                    Outcome::Done | Outcome::Forgotten => bail!("the arbiter gives no term"),
                }
            }
        })
    }

    /// Serves on a thread of its own for as long as the program lives.
    pub fn serve(self, agent: &Agent) -> anyhow::Result<()> {
        let agent = agent.clone();
        let Self { runtime, register, prefix, lease, asks, handle } = self;
        // What is shared on that thread alone does not go there in pieces.
        let register = Rc::into_inner(register).context("the arbiter is in use")?;
        let serve = move || {
            let register = Rc::new(register);
            let desk = Desk::new(register, prefix, agent.node, handle.lease, lease);
            runtime.block_on(async {
                tokio::join!(desk.work(asks, &agent), desk.watch(&agent));
            });
        };
        std::thread::Builder::new().name("arbiter".into()).spawn(serve)?;
        Ok(())
    }
}

/// A request that may not take for ever.
async fn bounded<T>(
    most: Duration,
    request: impl Future<Output = Result<T, Trouble>>,
) -> Result<T, Trouble> {
    tokio::time::timeout(most, request).await.unwrap_or_else(|_| {
        Err(Trouble::Unreachable(format!("no answer within {:.1} s", most.as_secs_f64())))
    })
}

/// What came of a wish.
enum Outcome {
    Granted(Record),
    Denied { held: Term, retry_at: Option<u64> },
    Done,
    Forgotten,
}

/// Where wishes are carried out.
struct Desk {
    register: Rc<Register>,
    prefix: String,
    /// Of the guest's record, once the guest is known.
    key: RefCell<Option<String>>,
    node: NodeId,
    lease: Arc<Lease>,
    length: Duration,
    holds: std::cell::Cell<Holds>,
    seen: RefCell<Seen>,
    attempt: RefCell<Option<Attempt>>,
}

impl Desk {
    fn new(
        register: Rc<Register>,
        prefix: String,
        node: NodeId,
        lease: Arc<Lease>,
        length: Duration,
    ) -> Self {
        Self {
            register,
            prefix,
            key: RefCell::default(),
            node,
            lease,
            length,
            holds: std::cell::Cell::default(),
            seen: RefCell::default(),
            attempt: RefCell::default(),
        }
    }

    fn set_guest(&self, name: &str, holds: Holds) {
        let key = Some(format!("{}/{name}", self.prefix));
        self.holds.set(holds);
        if *self.key.borrow() != key {
            *self.key.borrow_mut() = key;
            *self.seen.borrow_mut() = Seen::default();
        }
    }

    fn terms(&self) -> Terms {
        let grace = GRACE.max(self.length);
        Terms {
            lease_ns: self.length.as_nanos() as u64,
            grace_ns: grace.as_nanos() as u64,
            at_once: self.holds.get().at_once,
            shared: self.holds.get().shared,
        }
    }

    fn patience(&self) -> Duration {
        (self.length / 3).clamp(REQUEST.0, REQUEST.1)
    }

    fn key(&self) -> Result<String, Trouble> {
        let none = || Trouble::Refused("no guest is known yet".into());
        self.key.borrow().clone().ok_or_else(none)
    }

    /// Notes what the register holds.
    fn saw(&self, stored: Option<Stored>) -> Result<(), Trouble> {
        let mut seen = self.seen.borrow_mut();
        let version = stored.as_ref().map(|stored| stored.version.clone());
        if seen.known && seen.version == version {
            return Ok(());
        }
        let key = self.key()?;
        let record = stored.map(|stored| record::open(&stored.bytes, &key)).transpose();
        let record = record.map_err(Trouble::Corrupt)?;
        if !seen.known && seen.version == version && seen.record == record && seen.since > 0 {
            seen.known = true;
        } else {
            let writes = seen.writes;
            *seen = Seen { known: true, version, record, since: boot_ns(), writes };
        }
        Ok(())
    }

    /// As soon as a record is sent it may be so: from here on nothing leaves that its heirs do not
    /// have. False if output has left meanwhile without waiting for one that is new among them; a
    /// later wish knows of that.
    fn expect_heirs(&self, record: &Record, may_count: impl Fn(&BTreeSet<NodeId>) -> bool) -> bool {
        let mut heirs = self.lease.heirs();
        let new: BTreeSet<NodeId> = record.heirs.difference(&heirs.nodes).copied().collect();
        heirs.nodes.extend(&new);
        heirs.at_once |= record.at_once;
        if record.at_most_ns() == record.lease_ns {
            self.lease.without_heirs(boot_ns());
        }
        drop(heirs);
        let may_count = new.is_empty() || may_count(&new);
        if !may_count {
            self.lease.heirs().nodes.retain(|node| !new.contains(node));
        }
        may_count
    }

    async fn settle(
        &self,
        wish: &Wish,
        awaits: &dyn Fn(&BTreeSet<NodeId>) -> bool,
    ) -> Result<Outcome, Trouble> {
        let key = self.key()?;
        let mut just_read = false;
        loop {
            if !self.seen.borrow().known {
                self.saw(bounded(self.patience(), self.register.read(&key)).await?)?;
                just_read = true;
                if let Some(outcome) = self.resolve(wish) {
                    return Ok(outcome);
                }
            }
            let (verdict, version) = {
                let seen = self.seen.borrow();
                let known = seen.record.as_ref().map(|record| (record, seen.since));
                let verdict = judge(known, self.node, self.terms(), wish, boot_ns());
                (verdict, seen.version.clone())
            };
            let record = match verdict {
                Verdict::Write(record) => record,
                // What was seen a while ago may have become a yes.
                _ if !just_read => {
                    self.seen.borrow_mut().known = false;
                    continue;
                }
                Verdict::Denied { held, retry_at } => {
                    return Ok(Outcome::Denied { held, retry_at });
                }
                Verdict::Done => return Ok(Outcome::Done),
                Verdict::Forgotten => return Ok(Outcome::Forgotten),
            };
            let may_count = |new: &BTreeSet<NodeId>| match wish {
                Wish::Keep { .. } => awaits(new),
                // They were the heirs before, and are struck out before anything leaves.
                Wish::Take { .. } | Wish::GiveUp { .. } => true,
            };
            if !self.expect_heirs(&record, may_count) {
                return Ok(Outcome::Done);
            }
            let mut sent = boot_ns();
            if let Some(before) = self.attempt.take().filter(|before| before.record == record) {
                // Whichever of the two comes first, others count from then.
                sent = before.sent;
            }
            self.attempt.replace(Some(Attempt { record: record.clone(), sent }));
            self.seen.borrow_mut().known = false;
            let swap = self.register.swap(&key, version.as_ref(), record::seal(&key, &record));
            let Some(version) = bounded(self.patience(), swap).await? else { continue };
            let mut seen = self.seen.borrow_mut();
            let writes = seen.writes + 1;
            let (version, own) = (Some(version), Some(record.clone()));
            *seen = Seen { known: true, version, record: own, since: boot_ns(), writes };
            drop(seen);
            self.attempt.replace(None);
            self.written(&record, sent);
            return Ok(Outcome::Granted(record));
        }
    }

    /// Our record is there.
    fn written(&self, record: &Record, sent: u64) {
        if !record.over {
            self.lease.renew(sent, Duration::from_nanos(record.at_most_ns()));
        }
        let mut heirs = self.lease.heirs();
        (heirs.nodes, heirs.at_once) = (record.heirs.clone(), record.at_once);
    }

    /// Whether the swap that was not answered has happened; then what it means for `wish`.
    fn resolve(&self, wish: &Wish) -> Option<Outcome> {
        let attempt = self.attempt.take()?;
        let seen = self.seen.borrow();
        if seen.record.as_ref() != Some(&attempt.record) {
            // It has not, and cannot any more once the next swap of this version has.
            return None;
        }
        self.written(&attempt.record, attempt.sent);
        let same = match wish {
            Wish::Take { term, .. } => attempt.record.term == *term,
            Wish::Keep { term, heirs } => {
                attempt.record.term == *term && attempt.record.heirs == *heirs
            }
            Wish::GiveUp { term, .. } => attempt.record.term == *term && attempt.record.over,
        };
        same.then_some(Outcome::Granted(attempt.record))
    }

    /// Carries out wishes, the newest of those that wait, until nobody can have any.
    async fn work(&self, mut asks: UnboundedReceiver<Ask>, agent: &Agent) {
        let mut wish: Option<(Wish, Option<SyncSender<bool>>)> = None;
        let mut outage = Outage::default();
        let awaits = |nodes: &BTreeSet<NodeId>| agent.awaits(nodes);
        loop {
            let next = match &wish {
                None => asks.recv().await.map(Some),
                Some(_) => Some(asks.try_recv().ok()),
            };
            match next {
                None => return,
                Some(Some(ask)) => {
                    match ask {
                        Ask::Guest(name, holds) => self.set_guest(&name, holds),
                        Ask::Wish(newer) => {
                            // Nothing is wanted after the last wish.
                            if wish.as_ref().is_none_or(|(_, last)| last.is_none()) {
                                wish = Some((newer, None));
                            }
                        }
                        Ask::Last(last, done) => wish = Some((last, Some(done))),
                    }
                    continue;
                }
                Some(None) => {}
            }
            let Some((wanted, last)) = &wish else { continue };
            match self.settle(wanted, &awaits).await {
                Ok(outcome) => {
                    outage.over(agent);
                    if let Some(done) = last {
                        let _ = done.send(matches!(outcome, Outcome::Granted(_) | Outcome::Done));
                    }
                    self.tell(wanted, outcome, agent);
                    wish = None;
                }
                Err(trouble) => {
                    outage.met(&trouble, &self.lease, agent);
                    if let Register::Etcd(etcd) = &*self.register {
                        etcd.try_another();
                    }
                    tokio::time::sleep(AGAIN).await;
                }
            }
        }
    }

    fn tell(&self, wish: &Wish, outcome: Outcome, agent: &Agent) {
        match (wish, outcome) {
            (Wish::Take { term, .. } | Wish::Keep { term, .. }, Outcome::Granted(record)) => {
                let (term, until, heirs) = (*term, self.lease.until(), record.heirs);
                agent.brain.tell(Event::TermGranted { term, until, heirs });
                agent.renewed();
            }
            (
                Wish::Take { term, .. } | Wish::Keep { term, .. },
                Outcome::Denied { held, retry_at },
            ) => {
                if let Wish::Keep { .. } = wish {
                    self.lease.end();
                }
                let term = *term;
                agent.brain.tell(Event::TermDenied { term, held, retry_at });
            }
            (Wish::Take { term, .. }, _) => {
                agent.reporter.note(FORGOTTEN);
                let (term, held) = (*term, Term(0));
                agent.brain.tell(Event::TermDenied { term, held, retry_at: None });
            }
            (Wish::Keep { .. }, Outcome::Forgotten) => agent.reporter.note(FORGOTTEN),
            (Wish::Keep { .. }, Outcome::Done) | (Wish::GiveUp { .. }, _) => {}
        }
    }

    /// Sees what others write, so that the wait for their lease runs from when they wrote.
    async fn watch(&self, agent: &Agent) {
        loop {
            let key = self.key.borrow().clone();
            let holds = self.lease.until() > 0;
            let Some(key) = key.filter(|_| !holds) else {
                tokio::time::sleep(AGAIN).await;
                continue;
            };
            if let Err(trouble) = self.watch_one(&key).await {
                tracing::debug!(%trouble, "the arbiter cannot be watched");
                if let Trouble::Corrupt(text) = &trouble {
                    agent.reporter.note(text);
                    tokio::time::sleep(Duration::from_secs(10)).await;
                }
            }
            tokio::time::sleep(AGAIN).await;
        }
    }

    async fn watch_one(&self, key: &str) -> Result<(), Trouble> {
        let mut watch = match &*self.register {
            Register::Etcd(etcd) => Some(bounded(REQUEST.1, etcd.watch(key)).await?),
            Register::S3(_) => None,
        };
        let mut first = true;
        while self.lease.until() == 0 && self.key.borrow().as_deref() == Some(key) {
            let writes = self.seen.borrow().writes;
            let stored = match &mut watch {
                Some(watch) if !first => {
                    // Looks up now and then, whether it is to go on.
                    match tokio::time::timeout(REQUEST.1, watch.next()).await {
                        Ok(change) => change?,
                        Err(_) => continue,
                    }
                }
                _ => {
                    if !first {
                        tokio::time::sleep(self.length / 4).await;
                    }
                    bounded(REQUEST.1, self.register.read(key)).await?
                }
            };
            first = false;
            let mine = self.attempt.borrow().is_some() || self.seen.borrow().writes != writes;
            if !mine {
                self.saw(stored)?;
            }
        }
        Ok(())
    }
}

const FORGOTTEN: &str = "the arbiter has lost its record of this guest, or an older one is there: \
    nobody can know who reigns. The guest here goes on till its lease is over. Was the record \
    deleted, or a backup restored? Make sure that the guest runs nowhere else, then start it anew";

/// Whether the arbiter answers, as far as people have been told.
#[derive(Default)]
struct Outage {
    since: Option<Instant>,
    told: bool,
}

impl Outage {
    fn met(&mut self, trouble: &Trouble, lease: &Lease, agent: &Agent) {
        let since = *self.since.get_or_insert_with(Instant::now);
        let lasts = since.elapsed() > REQUEST.0 || !matches!(trouble, Trouble::Unreachable(_));
        if lasts && !std::mem::replace(&mut self.told, true) {
            let rest = match lease.until() {
                0 => "this spare cannot take over meanwhile".to_owned(),
                _ => format!(
                    "the guest goes on as long as it may: {:.1} s from now, or while all spares \
                     that could take over acknowledge",
                    lease.rest().as_secs_f64()
                ),
            };
            agent.reporter.note(&format!("THE ARBITER DOES NOT ANSWER; {rest}: {trouble}"));
        }
    }

    fn over(&mut self, agent: &Agent) {
        if self.told {
            agent.reporter.note("the arbiter answers again");
        }
        *self = Self::default();
    }
}

impl Agent {
    /// The record has changed: what waited for that can go on.
    fn renewed(&self) {
        let gate = self.face().gate.clone();
        self.let_go();
        if let Some(gate) = gate {
            gate.renewed();
        }
        self.owner.send(Message::OutputWaits);
    }
}
