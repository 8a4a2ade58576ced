//! Did the server keep what it acknowledged? Lanes that write numbered values, each to keys of
//! its own, and what their histories say after a failover.
//!
//! # A valid prefix
//!
//! A lane has one request in flight, so its writes have an order: write 1, 2, 3, … and the value
//! of a key is the number of the last write to it. After a failover under `timeline` the server
//! is the one of some instant a little before the death. So there is a `reached` such that every
//! key of the lane holds what writes 1 to `reached` made of it; later ones are *lost*. Any other
//! state, such as write 7 present and write 6 absent, is wrong.
//!
//! The server may have had write `reached` + 1 in hand at that instant: received, but not done. It
//! then does it after the failover, on a connection that is reset, while the client looks at its
//! keys on a new one. So this one write may come late, but not over a newer one.
//!
//! Over all lanes there must be one such instant: no lane may still have a write that was sent
//! after another lane's lost write was acknowledged. [`verify`] checks that.

use std::time::Duration;

use super::connection::{ClientError, Connection};
use super::lane::{LaneRecord, Session};
use super::wire::Protocol;
use crate::clock::Instant;
use crate::dice::Dice;

/// Keys asked for in one go when many are looked at.
const BATCH: usize = 500;
/// A new connection looks at the keys written in this time only, so that looking does not load a
/// server that has just taken over. The rest is looked at in the end.
const RECENT: Duration = Duration::from_secs(10);

/// What the lanes of a store do.
#[derive(Clone, Debug)]
pub struct StorePlan {
    /// How the server talks.
    pub protocol: Protocol,
    /// Keys, divided evenly among the lanes. All are written before the load starts.
    pub keys: usize,
    /// Length of a value.
    pub value_bytes: usize,
    /// Part of requests that are writes, from 0.0 to 1.0.
    pub writes: f64,
    /// For the choice of keys.
    pub seed: u64,
}

impl StorePlan {
    /// The sessions of `lanes` lanes.
    pub fn sessions(&self, lanes: usize) -> Vec<StoreLane> {
        let keys_of = |lane: usize| self.keys * (lane + 1) / lanes - self.keys * lane / lanes;
        let make = |lane: usize| StoreLane {
            plan: self.clone(),
            dice: Dice::new(self.seed).part(lane as u64),
            lane,
            values: vec![0; keys_of(lane)],
            writes: Vec::new(),
            asked: None,
            is_filled: false,
            keys_verified: 0,
        };
        (0..lanes).map(make).collect()
    }
}

/// What is known of a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    /// The reply to it was good.
    Acknowledged,
    /// Its connection broke before the reply: it may be there or not, or come late.
    Unknown,
    /// It was found to be missing.
    Missing,
    /// It was found to be missing, and is the one that the server may have had in hand.
    InHand,
}

#[derive(Clone, Copy, Debug)]
struct Write {
    key: usize,
    sent: Instant,
    done: Instant,
    acknowledged: bool,
    fate: Fate,
}

/// A request without a reply so far.
#[derive(Clone, Copy, Debug)]
struct Asked {
    key: usize,
    writes: bool,
    sent: Instant,
}

/// A write that was acknowledged and is gone.
#[derive(Clone, Copy, Debug)]
pub struct Loss {
    /// When the client sent it.
    pub sent: Instant,
    /// When the client had the reply.
    pub acknowledged: Instant,
}

/// The session of one lane.
#[derive(Clone, Debug)]
pub struct StoreLane {
    plan: StorePlan,
    dice: Dice,
    lane: usize,
    /// The number of the write that each key holds, as far as we know; 0 is the first filling.
    values: Vec<u64>,
    /// Write number n is at n - 1.
    writes: Vec<Write>,
    asked: Option<Asked>,
    is_filled: bool,
    /// Keys found right when everything was last looked at.
    keys_verified: usize,
}

impl StoreLane {
    fn key(&self, key: usize) -> String {
        format!("k{}:{key:07}", self.lane)
    }

    /// The value that write `number` gives to `key`.
    fn value(&self, key: usize, number: u64) -> String {
        let mut value = format!("{number}:{}:", self.key(key));
        while value.len() < self.plan.value_bytes {
            let digit = (number as usize + key + value.len()) % 26;
            value.push(char::from(b'a' + digit as u8));
        }
        value
    }

    /// The number in a value of `key`, if the value is as it was written.
    fn number(&self, key: usize, value: Option<&str>) -> Result<u64, ClientError> {
        let wrong = || {
            let value = value.map(|value| &value[..value.len().min(40)]);
            ClientError::Wrong(format!("{} holds {value:?}", self.key(key)))
        };
        let value = value.ok_or_else(wrong)?;
        let digits = value.split(':').next().unwrap_or_default();
        let number = digits.parse().map_err(|_| wrong())?;
        if self.value(key, number) == value { Ok(number) } else { Err(wrong()) }
    }

    /// Writes every key for the first time.
    fn fill(&mut self, connection: &mut Connection) -> Result<(), ClientError> {
        for start in (0..self.values.len()).step_by(BATCH) {
            let batch = start..(start + BATCH).min(self.values.len());
            let mut request = Vec::new();
            for key in batch.clone() {
                let (name, value) = (self.key(key), self.value(key, 0));
                self.plan.protocol.put_set(&mut request, &name, &value);
            }
            connection.send(&request)?;
            for _ in batch {
                self.plan.protocol.take_set(connection)?;
            }
        }
        self.is_filled = true;
        Ok(())
    }

    /// The numbers that these keys hold.
    fn look(
        &self,
        connection: &mut Connection,
        keys: &[usize],
    ) -> Result<Vec<(usize, u64)>, ClientError> {
        let mut found = Vec::with_capacity(keys.len());
        for batch in keys.chunks(BATCH) {
            let mut request = Vec::new();
            for key in batch {
                self.plan.protocol.put_get(&mut request, &self.key(*key));
            }
            connection.send(&request)?;
            for key in batch {
                let value = self.plan.protocol.take_get(connection)?;
                found.push((*key, self.number(*key, value.as_deref())?));
            }
        }
        Ok(found)
    }

    /// Writes made before the recent ones.
    fn writes_before(&self, since: Instant) -> usize {
        self.writes.partition_point(|write| write.sent < since)
    }

    fn fate(&self, number: u64) -> Option<Fate> {
        self.writes.get(usize::try_from(number).ok()?.checked_sub(1)?).map(|write| write.fate)
    }

    /// Whether a key may hold write `found`, where we would expect write `expected`.
    fn may_hold(&self, found: u64, expected: u64) -> bool {
        match self.fate(found) {
            _ if found == expected => true,
            Some(Fate::Unknown) => true,
            Some(Fate::InHand) => expected < found,
            Some(Fate::Acknowledged | Fate::Missing) | None => false,
        }
    }

    /// The server has this write after all.
    fn came(&mut self, number: u64) {
        let index = (number as usize).wrapping_sub(1);
        if let Some(write) = self.writes.get_mut(index).filter(|one| one.fate == Fate::InHand) {
            write.fate = Fate::Acknowledged;
        }
    }

    /// Looks at the keys written after `since` and takes the server's word for it, if it is a
    /// valid prefix. Returns how many are right.
    fn audit_recent(&mut self, connection: &mut Connection) -> Result<usize, ClientError> {
        let settled = self.writes_before(Instant::now() - RECENT);
        let mut keys: Vec<usize> = self.writes[settled..].iter().map(|write| write.key).collect();
        keys.sort_unstable();
        keys.dedup();
        if keys.is_empty() && !self.values.is_empty() {
            keys.push(0);
        }
        self.audit(connection, &keys, settled as u64)
    }

    /// Looks at `keys`: with the first `settled` writes present, are they a valid prefix?
    fn audit(
        &mut self,
        connection: &mut Connection,
        keys: &[usize],
        settled: u64,
    ) -> Result<usize, ClientError> {
        let found = self.look(connection, keys)?;
        let reached = found.iter().map(|(_, number)| *number).max().unwrap_or(0).max(settled);
        if reached as usize > self.writes.len() {
            return Err(ClientError::Wrong(format!("write {reached} was never made")));
        }
        let mut expected = vec![0; self.values.len()];
        for (write, number) in self.writes.iter().zip(1..=reached) {
            if write.fate == Fate::Acknowledged {
                expected[write.key] = number;
            }
        }
        for (key, found) in &found {
            let expected = expected[*key];
            if !self.may_hold(*found, expected) {
                let key = self.key(*key);
                return Err(ClientError::Wrong(format!(
                    "{key} holds write {found}, not {expected}, though write {reached} is there"
                )));
            }
        }
        self.settle(reached);
        let verified = found.len();
        for (key, number) in found {
            self.came(number);
            self.values[key] = number;
        }
        Ok(verified)
    }

    /// The server has writes up to `reached`; those after it are missing.
    fn settle(&mut self, reached: u64) {
        let mut fate = Fate::InHand;
        for write in &mut self.writes[reached as usize..] {
            if write.fate == Fate::Acknowledged {
                write.fate = fate;
            }
            fate = Fate::Missing;
        }
    }

    fn ask_for(&mut self, key: usize, writes: bool, request: &mut Vec<u8>) {
        let name = self.key(key);
        if writes {
            let value = self.value(key, self.writes.len() as u64 + 1);
            self.plan.protocol.put_set(request, &name, &value);
        } else {
            self.plan.protocol.put_get(request, &name);
        }
        self.asked = Some(Asked { key, writes, sent: Instant::now() });
    }

    /// What became of a write that was sent.
    fn wrote(&mut self, asked: Asked, acknowledged: bool) {
        let fate = if acknowledged { Fate::Acknowledged } else { Fate::Unknown };
        let Asked { key, sent, .. } = asked;
        self.writes.push(Write { key, sent, done: Instant::now(), acknowledged, fate });
        if acknowledged {
            self.values[key] = self.writes.len() as u64;
        }
    }

    fn take_read(&mut self, connection: &mut Connection, key: usize) -> Result<(), ClientError> {
        let value = self.plan.protocol.take_get(connection)?;
        let found = self.number(key, value.as_deref())?;
        let expected = self.values[key];
        if !self.may_hold(found, expected) {
            let key = self.key(key);
            return Err(ClientError::Wrong(format!(
                "{key} went from write {expected} to {found} on one connection"
            )));
        }
        self.came(found);
        self.values[key] = found;
        Ok(())
    }

    fn losses(&self) -> impl Iterator<Item = Loss> + '_ {
        let is_gone = |fate: Fate| matches!(fate, Fate::Missing | Fate::InHand);
        let is_lost = move |write: &&Write| write.acknowledged && is_gone(write.fate);
        let loss = |write: &Write| Loss { sent: write.sent, acknowledged: write.done };
        self.writes.iter().filter(is_lost).map(loss)
    }
}

impl Session for StoreLane {
    fn open(&mut self, connection: &mut Connection) -> Result<(), ClientError> {
        if !self.is_filled {
            return self.fill(connection);
        }
        self.audit_recent(connection)?;
        Ok(())
    }

    fn ask(&mut self, request: &mut Vec<u8>) {
        let key = self.dice.below(self.values.len() as u64) as usize;
        let writes = self.dice.chance(self.plan.writes);
        self.ask_for(key, writes, request);
    }

    fn take(&mut self, connection: &mut Connection) -> Result<(), ClientError> {
        let nothing = || ClientError::Wrong("a reply to nothing".to_owned());
        let asked = self.asked.ok_or_else(nothing)?;
        if asked.writes {
            self.plan.protocol.take_set(connection)?;
            self.wrote(asked, true);
        } else {
            self.take_read(connection, asked.key)?;
        }
        self.asked = None;
        Ok(())
    }

    fn give_up(&mut self) {
        if let Some(asked) = self.asked.take().filter(|asked| asked.writes) {
            self.wrote(asked, false);
        }
    }

    fn close(&mut self, connection: &mut Connection) -> Result<(), ClientError> {
        let keys: Vec<usize> = (0..self.values.len()).collect();
        self.keys_verified = self.audit(connection, &keys, 0)?;
        Ok(())
    }
}

/// What the histories of all lanes say.
#[derive(Clone, Debug, Default)]
pub struct Verdict {
    /// Keys that were right at the end.
    pub keys_verified: usize,
    /// Writes that were acknowledged.
    pub writes_acknowledged: usize,
    /// Of these, the ones that are gone, in the order of their acknowledgement.
    pub lost: Vec<Loss>,
    /// Broken promises, in words. Empty is what we want.
    pub wrongs: Vec<String>,
}

impl Verdict {
    /// How long before `death` the oldest lost write was acknowledged.
    pub fn oldest_loss_before(&self, death: Instant) -> Option<Duration> {
        self.lost.first().map(|loss| death.since(loss.acknowledged))
    }
}

/// Judges the lanes of one load. `death` is when the server was killed, if it was: without, no
/// write may be missing.
pub fn verify(lanes: &[LaneRecord<StoreLane>], death: Option<Instant>) -> Verdict {
    let mut verdict = Verdict::default();
    for (number, lane) in lanes.iter().enumerate() {
        verdict.wrongs.extend(lane.wrongs.iter().map(|wrong| format!("lane {number}: {wrong}")));
        if !lane.closed {
            verdict.wrongs.push(format!("lane {number} could not look at its keys at the end"));
        }
        let session = &lane.session;
        verdict.keys_verified += if lane.closed { session.keys_verified } else { 0 };
        verdict.writes_acknowledged +=
            session.writes.iter().filter(|write| write.acknowledged).count();
        verdict.lost.extend(session.losses());
    }
    verdict.lost.sort_by_key(|loss| loss.acknowledged);
    check_one_instant(lanes, death, &mut verdict);
    verdict
}

/// Is there one instant that all lanes went back to?
fn check_one_instant(
    lanes: &[LaneRecord<StoreLane>],
    death: Option<Instant>,
    verdict: &mut Verdict,
) {
    let Some(first_lost) = verdict.lost.first().copied() else { return };
    let Some(death) = death else {
        let count = verdict.lost.len();
        verdict.wrongs.push(format!("{count} acknowledged writes are gone"));
        return;
    };
    let survives = |write: &&Write| {
        write.fate == Fate::Acknowledged && write.done <= death && write.sent <= death
    };
    let writes = lanes.iter().flat_map(|lane| &lane.session.writes);
    let last_kept = writes.filter(survives).map(|write| write.sent).max().unwrap_or_default();
    if last_kept > first_lost.acknowledged {
        let gap = last_kept.since(first_lost.acknowledged);
        verdict.wrongs.push(format!(
            "a write sent {gap:?} after an earlier one was acknowledged survived it"
        ));
    }
    if let Some(late) = verdict.lost.iter().find(|loss| loss.sent > death) {
        let after = late.sent.since(death);
        verdict.wrongs.push(format!("a write sent {after:?} after the death was lost"));
    }
}

#[cfg(test)]
mod tests;
