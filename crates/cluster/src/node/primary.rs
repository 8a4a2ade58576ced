//! The primary's half: watch the spares, keep the term, hand it over.

use super::*;

impl Node {
    pub(super) fn watch_lease(&mut self, now: Nanos, out: &mut Vec<Action>) {
        let State::Reigning(reign) = &mut self.state else { return };
        if now >= reign.lease_until {
            self.fence(FenceCause::LeaseExpired, out);
        } else if now >= reign.renew_at {
            let rest = reign.lease_until - now;
            reign.renew_at = now.saturating_add((rest / 2).max(1));
            out.push(Action::RenewTerm(reign.term));
        }
    }

    pub(super) fn watch_spares(&mut self, now: Nanos, out: &mut Vec<Action>) {
        let State::Reigning(reign) = &self.state else { return };
        let silence_ns = self.config.silence_ns;
        let silent: Vec<(NodeId, DropCause)> = reign
            .spares
            .iter()
            .filter_map(|(node, spare)| Some((*node, spare.drop_cause(now, silence_ns)?)))
            .collect();
        for (node, cause) in silent {
            self.spare_gone(node, Some(cause), out);
        }
    }

    /// `drop`: why to close the stream; `None` when it is closed already.
    pub(super) fn spare_gone(
        &mut self,
        node: NodeId,
        drop: Option<DropCause>,
        out: &mut Vec<Action>,
    ) {
        let State::Reigning(reign) = &mut self.state else { return };
        if reign.spares.remove(&node).is_none() {
            return;
        }
        if let Some(cause) = drop {
            out.push(Action::DropSpare { node, cause });
        }
        self.spares_changed(out);
        let State::Reigning(reign) = &self.state else { return };
        if let Phase::Freezing { to, .. } = reign.phase
            && to == node
        {
            self.thaw(out);
            out.push(Action::SwitchoverImpossible);
        }
    }

    pub(super) fn spares_changed(&mut self, out: &mut Vec<Action>) {
        let State::Reigning(reign) = &mut self.state else { return };
        out.push(Action::TellMembers(reign.members()));
        let protected = reign.spares.values().any(Spare::is_ready);
        if protected != reign.protected {
            reign.protected = protected;
            out.push(if protected { Action::BecomeProtected } else { Action::BecomeUnprotected });
        }
    }

    pub(super) fn stream_closed(
        &mut self,
        now: Nanos,
        peer: NodeId,
        how: Closed,
        out: &mut Vec<Action>,
    ) {
        match &mut self.state {
            State::Reigning(reign) => {
                reclaim_at_once(reign, peer, how, now);
                self.spare_gone(peer, None, out);
                self.watch_offer(now, out);
            }
            State::Following(f) if f.primary == peer && f.attached => match how {
                Closed::ByPeer => self.primary_gone(now, peer, SuspectCause::AgentDied, out),
                // Without heartbeats either it is silent on every way there is.
                Closed::Silent if f.suspicion.is_none() && f.heard_at.is_none() => {
                    f.stream_over = true;
                    self.primary_gone(now, peer, SuspectCause::Silence, out);
                }
                Closed::Goodbye | Closed::ByUs | Closed::Silent => {
                    let gone = match (f.suspicion.map(|s| s.cause), how) {
                        (Some(SuspectCause::Silence), Closed::Goodbye) | (None, _) => false,
                        (Some(_), _) => true,
                    };
                    f.stream_over = gone;
                    if !gone && f.claim.is_none() {
                        f.attached = false;
                        out.push(Action::Join { primary: f.primary, term: f.term });
                    }
                }
            },
            State::Following(_)
            | State::Asking(_)
            | State::Waiting
            | State::Fenced(..)
            | State::Ended => {}
        }
    }

    pub(super) fn spare_joined(&mut self, now: Nanos, node: NodeId, out: &mut Vec<Action>) {
        let State::Reigning(reign) = &mut self.state else {
            return out.push(Action::RefuseSpare(node));
        };
        let taken: Vec<u32> = reign.spares.values().map(|spare| spare.rank).collect();
        let again = reign.spares.get(&node).map(|spare| spare.rank);
        let free = again.or_else(|| (0..RANKS_MAX).find(|rank| !taken.contains(rank)));
        let Some(rank) = free.filter(|_| reign.phase == Phase::Running) else {
            return out.push(Action::RefuseSpare(node));
        };
        let joined =
            Spare { rank, acknowledged: None, joined_at: now, heard_at: None, hears: false };
        reign.spares.insert(node, joined);
        let term = reign.term;
        out.push(Action::AcceptSpare { node, rank, term });
        self.spares_changed(out);
    }

    pub(super) fn spare_acknowledged(
        &mut self,
        now: Nanos,
        node: NodeId,
        position: Position,
        out: &mut Vec<Action>,
    ) {
        let State::Reigning(reign) = &mut self.state else { return };
        let Some(spare) = reign.spares.get_mut(&node) else { return };
        spare.heard_at = spare.heard_at.map(|_| now);
        let was_ready = spare.is_ready();
        spare.acknowledged = spare.acknowledged.max(Some(position));
        if spare.is_ready() != was_ready {
            self.spares_changed(out);
        }
        self.offer_when_ready(now, out);
    }

    pub(super) fn guest_died(&mut self, out: &mut Vec<Action>) {
        if let State::Reigning(reign) = &self.state {
            if !matches!(reign.phase, Phase::Offered { .. }) {
                out.push(Action::TellGuestDied);
            }
            self.fence(FenceCause::GuestDied, out);
        }
    }

    pub(super) fn guest_ended(&mut self, out: &mut Vec<Action>) {
        match &self.state {
            State::Reigning(_) | State::Asking(_) | State::Following(_) | State::Waiting => {
                self.state = State::Ended;
                out.push(Action::EndProtection);
            }
            State::Fenced(..) | State::Ended => {}
        }
    }

    pub(super) fn switchover_asked(&mut self, to: Option<NodeId>, out: &mut Vec<Action>) {
        let State::Reigning(reign) = &mut self.state else {
            return out.push(Action::SwitchoverImpossible);
        };
        let fit = reign
            .spares
            .iter()
            .filter(|(node, spare)| spare.is_ready() && to.is_none_or(|wanted| wanted == **node))
            .min_by_key(|(_, spare)| spare.rank)
            .map(|(node, _)| *node);
        let Some(to) = fit.filter(|_| reign.phase == Phase::Running) else {
            return out.push(Action::SwitchoverImpossible);
        };
        reign.phase = Phase::Freezing { to, frozen_at: None };
        // From here on `to` is first in the queue, so that no other spare claims what it is given.
        out.push(Action::TellMembers(reign.members()));
        out.push(Action::FreezeGuest { to });
    }

    pub(super) fn guest_frozen(&mut self, now: Nanos, position: Position, out: &mut Vec<Action>) {
        if let State::Reigning(reign) = &mut self.state
            && let Phase::Freezing { frozen_at, .. } = &mut reign.phase
        {
            *frozen_at = Some(position);
            reign.position = reign.position.max(position);
            self.offer_when_ready(now, out);
        }
    }

    pub(super) fn offer_when_ready(&mut self, now: Nanos, out: &mut Vec<Action>) {
        let term = self.seen.next();
        let State::Reigning(reign) = &mut self.state else { return };
        let Phase::Freezing { to, frozen_at: Some(position) } = reign.phase else { return };
        let acknowledged = reign.spares.get(&to).and_then(|spare| spare.acknowledged);
        if acknowledged >= Some(position) {
            let give_up_at = now.saturating_add(self.config.handover_ns);
            reign.phase = Phase::Offered { to, term, give_up_at, reclaim: None };
            out.push(Action::OfferSwitchover { to, term, position });
        }
    }

    /// An offer without an answer: only the arbiter can say whether it was taken.
    pub(super) fn watch_offer(&mut self, now: Nanos, out: &mut Vec<Action>) {
        let State::Reigning(reign) = &mut self.state else { return };
        let Phase::Offered { term, give_up_at, reclaim, .. } = &mut reign.phase else { return };
        if now >= *give_up_at && reclaim.is_none() {
            let newer = self.seen.max(*term).next();
            *reclaim = Some(newer);
            out.push(Action::RequestTerm { term: newer, consent_of: Some(reign.term) });
        }
    }

    pub(super) fn switchover_refused(&mut self, node: NodeId, out: &mut Vec<Action>) {
        let State::Reigning(reign) = &self.state else { return };
        if let Phase::Offered { to, .. } = reign.phase
            && to == node
        {
            self.thaw(out);
            out.push(Action::SwitchoverImpossible);
        }
    }

    pub(super) fn thaw(&mut self, out: &mut Vec<Action>) {
        let State::Reigning(reign) = &mut self.state else { return };
        reign.phase = Phase::Running;
        out.push(Action::ThawGuest { term: reign.term });
        out.push(Action::TellMembers(reign.members()));
        self.send_beat(out);
    }
}

/// The spare that holds the offer died with its agent: it will not take over, ask at once.
fn reclaim_at_once(reign: &mut Reign, peer: NodeId, how: Closed, now: Nanos) {
    if let Phase::Offered { to, give_up_at, .. } = &mut reign.phase
        && *to == peer
        && how == Closed::ByPeer
    {
        *give_up_at = now;
    }
}

impl Spare {
    /// A spare that never hears heartbeats would not notice silence.
    pub(super) fn is_ready(&self) -> bool {
        self.acknowledged.is_some() && self.hears
    }

    /// Notes a heartbeat; whether it makes the spare ready.
    pub(super) fn hear(&mut self, now: Nanos, says_ready: bool) -> bool {
        let was_ready = self.is_ready();
        self.heard_at = Some(now);
        self.hears |= says_ready;
        self.is_ready() != was_ready
    }

    pub(super) fn drop_cause(&self, now: Nanos, silence_ns: Nanos) -> Option<DropCause> {
        match self.heard_at {
            Some(at) => (now.saturating_sub(at) >= silence_ns).then_some(DropCause::Silent),
            None => {
                let patience_ns = silence_ns.saturating_mul(FIRST_BEAT_SILENCES);
                let over = now.saturating_sub(self.joined_at) >= patience_ns;
                over.then_some(DropCause::NeverHeard)
            }
        }
    }
}

impl Reign {
    pub(super) fn new(now: Nanos, term: Term, until: Nanos, phase: Phase) -> Reign {
        let mut reign = Reign {
            term,
            position: Position::default(),
            lease_until: until,
            renew_at: until,
            phase,
            spares: BTreeMap::new(),
            protected: false,
        };
        reign.lease(now, until);
        reign
    }

    pub(super) fn lease(&mut self, now: Nanos, until: Nanos) {
        self.lease_until = until;
        self.renew_at = match until {
            Nanos::MAX => Nanos::MAX,
            _ => now.saturating_add(until.saturating_sub(now) / 2),
        };
    }

    pub(super) fn members(&self) -> Vec<Member> {
        let heir = match self.phase {
            Phase::Freezing { to, .. } | Phase::Offered { to, .. } => Some(to),
            Phase::TakingOver | Phase::Running => None,
        };
        let rank = |node: NodeId, rank: u32| match heir {
            None => rank,
            Some(heir) if heir == node => 0,
            Some(_) => rank + RANKS_MAX,
        };
        self.spares
            .iter()
            .map(|(node, spare)| Member {
                node: *node,
                rank: rank(*node, spare.rank),
                ready: spare.is_ready(),
            })
            .collect()
    }
}
