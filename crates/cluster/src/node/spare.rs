//! The spare's half: watch the primary, claim its term.

use super::*;

impl Node {
    pub(super) fn hear_primary(&mut self, now: Nanos, beat: Beat, out: &mut Vec<Action>) {
        let State::Following(f) = &mut self.state else { return };
        if beat.role == BeatRole::TakeoverFailed && f.inherited.is_some() {
            f.ghost = f.inherited.take();
            f.attached = true;
        }
        if matches!(beat.role, BeatRole::Fenced | BeatRole::TakeoverFailed) {
            return self.primary_gone(now, beat.from, SuspectCause::Fenced, out);
        }
        if beat.role == BeatRole::Suspended {
            return self.primary_gone(now, beat.from, SuspectCause::Suspended, out);
        }
        if !beat.leads() {
            return;
        }
        match f.suspicion.map(|s| (s.cause, now.saturating_sub(s.since))) {
            None => f.heard_at = Some(now),
            Some((SuspectCause::Silence | SuspectCause::Suspended, _)) => {
                f.trust(now);
                out.push(Action::Trust(beat.from));
                if std::mem::take(&mut f.stream_over) {
                    f.attached = false;
                    out.push(Action::Join { primary: f.primary, term: f.term });
                }
            }
            // Heartbeats that were on their way when the agent died prove nothing.
            Some((SuspectCause::AgentDied, age)) if age > self.config.heartbeat_ns => {
                f.trust(now);
                f.attached = false;
                out.push(Action::Trust(beat.from));
                out.push(Action::Join { primary: f.primary, term: f.term });
            }
            Some((SuspectCause::AgentDied | SuspectCause::GuestDied | SuspectCause::Fenced, _)) => {
            }
        }
    }

    pub(super) fn primary_gone(
        &mut self,
        now: Nanos,
        node: NodeId,
        cause: SuspectCause,
        out: &mut Vec<Action>,
    ) {
        let State::Following(f) = &mut self.state else { return };
        if f.primary != node {
            return;
        }
        let known = match f.suspicion {
            None => false,
            Some(Suspicion {
                cause: before @ (SuspectCause::Silence | SuspectCause::Suspended),
                ..
            }) => cause == before || cause == SuspectCause::Silence,
            Some(_) => true,
        };
        if !known {
            // An earlier suspicion keeps its date: the others may be waiting for our turn to pass.
            let since = f.suspicion.map_or(now, |s| s.since);
            f.suspicion = Some(Suspicion { cause, since });
            out.push(Action::Suspect { primary: node, cause });
        }
        self.try_claim(now, out);
    }

    pub(super) fn watch_primary(&mut self, now: Nanos, out: &mut Vec<Action>) {
        let State::Following(f) = &self.state else { return };
        let silent = f.heard_at.is_some_and(|at| now.saturating_sub(at) >= self.config.silence_ns);
        if f.suspicion.is_none() && silent {
            return self.primary_gone(now, f.primary, SuspectCause::Silence, out);
        }
        self.try_claim(now, out);
    }

    pub(super) fn try_claim(&mut self, now: Nanos, out: &mut Vec<Action>) {
        let State::Following(f) = &self.state else { return };
        let Some(suspicion) = f.suspicion else { return };
        if f.claim.is_some() {
            return;
        }
        let unfit = self.unfit(f);
        let due = now >= self.claim_at(f, suspicion);
        let term = match mutate::is(Mutation::StaleClaim) {
            true => f.term,
            false => self.seen.max(f.term).next(),
        };
        let by = match suspicion.cause {
            SuspectCause::GuestDied | SuspectCause::Fenced => By::Word(f.term),
            SuspectCause::Silence | SuspectCause::AgentDied | SuspectCause::Suspended => By::Heir,
        };
        let State::Following(f) = &mut self.state else { return };
        match unfit {
            Some(reason) if !f.told_unfit => {
                f.told_unfit = true;
                out.push(Action::CannotTakeOver(reason));
            }
            Some(_) => {}
            None if due => {
                f.claim = Some(Claim { term, offered: false });
                out.push(Action::RequestTerm { term, by });
            }
            None => {}
        }
    }

    /// When a suspecting spare may claim: see the essay on [`Node`].
    pub(super) fn claim_at(&self, f: &Following, suspicion: Suspicion) -> Nanos {
        let own = self.usable(f).unwrap_or_default().epoch;
        let far_behind = self.heard.values().any(|(at, beat)| {
            beat.role == BeatRole::SpareReady
                && beat.term == f.term
                && beat.position.epoch.0 > own.0.saturating_add(1)
                && at.saturating_add(self.config.silence_ns) >= suspicion.since
        });
        let later = u64::from(far_behind) + u64::from(f.stands_by);
        let turns = u64::from(f.rank) + later * u64::from(RANKS_MAX);
        suspicion
            .since
            .saturating_add(turns.saturating_mul(self.config.silence_ns))
            .max(f.claim_after)
    }

    pub(super) fn joined(
        &mut self,
        now: Nanos,
        (primary, term): (NodeId, Term),
        rank: u32,
        quorum: Quorum,
    ) {
        let follows = match &self.state {
            State::Waiting => term >= self.seen,
            State::Following(f) => (term, primary) >= (f.term, f.primary),
            State::Asking(_) | State::Reigning(_) | State::Fenced(..) | State::Ended => false,
        };
        if follows {
            self.seen = self.seen.max(term);
            self.config.quorum = quorum;
            let (heard_at, inherited) = match &self.state {
                State::Following(f) if f.primary == primary && f.term == term => {
                    let before = f.ghost.filter(|_| self.config.has_arbiter);
                    (f.heard_at.map(|_| now), before.or(f.inherited))
                }
                _ => (None, None),
            };
            // A ghost of before is not one of this stream: all of a checkpoint follows.
            let following = Following::new(heard_at, primary, term);
            self.state =
                State::Following(Following { rank, attached: true, inherited, ..following });
        }
    }

    pub(super) fn members(&mut self, members: &[Member]) {
        let State::Following(f) = &mut self.state else { return };
        if let Some(own) = members.iter().find(|member| member.node == self.config.node) {
            (f.rank, f.stands_by) = (own.rank, own.stands_by);
        }
    }

    pub(super) fn committed(&mut self, term: Term, position: Position) {
        let State::Following(f) = &mut self.state else { return };
        if f.term == term && f.attached {
            f.ghost = f.ghost.max(Some(position));
            f.inherited = None;
        }
    }

    pub(super) fn switchover_offered(
        &mut self,
        from: NodeId,
        term: Term,
        position: Position,
        out: &mut Vec<Action>,
    ) {
        let fit = match &self.state {
            State::Following(f) => {
                let known = f.primary == from && f.ghost >= Some(position);
                known && self.unfit(f).is_none_or(|reason| reason == CannotTakeOver::StandsBy)
            }
            _ => false,
        };
        if let State::Following(f) = &mut self.state
            && fit
            && f.claim.is_none()
            && term > f.term
        {
            f.claim = Some(Claim { term, offered: true });
            return out.push(Action::RequestTerm { term, by: By::Offer(f.term) });
        }
        out.push(Action::RefuseSwitchover { from });
    }

    pub(super) fn takeover_forced(&mut self, out: &mut Vec<Action>) {
        let term = self.seen.next();
        let State::Following(f) = &mut self.state else { return };
        f.ghost = f.ghost.or(f.inherited.take());
        if f.ghost.is_some() && f.claim.is_none() {
            f.claim = Some(Claim { term, offered: false });
            out.push(Action::RequestTerm { term, by: By::First });
        } else {
            out.push(Action::CannotTakeOver(CannotTakeOver::GhostIncomplete));
        }
    }

    /// What this spare could go on from: its ghost of this stream; or the one that it has had
    /// before, of an earlier stream or of the reign before, if nobody has heard the primary's guest
    /// since. Only an arbiter knows that: it has this spare among the heirs until the primary
    /// strikes it out, and nothing leaves before that.
    pub(super) fn usable(&self, f: &Following) -> Option<Position> {
        f.ghost.or(f.inherited.filter(|_| self.config.has_arbiter))
    }

    /// Why this spare must not claim, if it must not.
    pub(super) fn unfit(&self, f: &Following) -> Option<CannotTakeOver> {
        if mutate::is(Mutation::AnyGhost) {
            None
        } else if self.usable(f).is_none() {
            Some(CannotTakeOver::GhostIncomplete)
        } else if !f.attached && !self.config.has_arbiter {
            Some(CannotTakeOver::Detached)
        } else if self.seen > f.term && !self.config.has_arbiter {
            Some(CannotTakeOver::AnotherReigned)
        } else if f.stands_by && !self.config.has_arbiter {
            Some(CannotTakeOver::StandsBy)
        } else {
            None
        }
    }

    pub(super) fn takeover_done(&mut self, out: &mut Vec<Action>) {
        if let State::Reigning(reign) = &mut self.state
            && reign.phase == Phase::TakingOver
        {
            reign.phase = Phase::Running;
            self.keep_heirs(out);
            // A primary that has switched over waits for it.
            self.send_beat(out);
        }
    }

    pub(super) fn takeover_failed(&mut self, out: &mut Vec<Action>) {
        if let State::Reigning(Reign { phase: Phase::TakingOver, .. }) = &self.state {
            self.fence(FenceCause::TakeoverFailed, out);
        }
    }
}

impl Following {
    pub(super) fn new(heard_at: Option<Nanos>, primary: NodeId, term: Term) -> Following {
        Following {
            primary,
            term,
            rank: RANKS_MAX,
            attached: false,
            stream_over: false,
            stands_by: false,
            ghost: None,
            inherited: None,
            heard_at,
            suspicion: None,
            claim: None,
            claim_after: 0,
            told_unfit: false,
        }
    }

    pub(super) fn trust(&mut self, now: Nanos) {
        self.heard_at = Some(now);
        self.suspicion = None;
        self.told_unfit = false;
    }
}
