//! The primary's half: watch the spares, keep the term, hand it over.

use super::*;

impl Node {
    pub(super) fn watch_lease(&mut self, now: Nanos, out: &mut Vec<Action>) {
        let fences = self.config.fence_at_expiry;
        let State::Reigning(reign) = &mut self.state else { return };
        if let Phase::Offered { .. } = reign.phase {
            // The guest stands still and has no address: it does no harm whoever reigns.
            return;
        }
        let over = now >= reign.lease_until;
        if over && fences && !mutate::is(Mutation::NoExpiry) {
            return self.fence(FenceCause::LeaseExpired, out);
        }
        let fresh = over && !reign.suspended;
        reign.suspended |= over;
        if now >= reign.renew_at || fresh {
            let rest = reign.lease_until.saturating_sub(now) / 2;
            let rest = if rest == 0 { self.config.silence_ns } else { rest };
            reign.renew_at = now.saturating_add(rest.max(self.config.heartbeat_ns));
            let renewal = reign.renewal();
            out.push(renewal);
        }
        if fresh {
            out.push(Action::Suspend);
            self.send_beat(out);
        }
    }

    /// The arbiter has these now. Whoever has come or gone since is told at once: one that is not
    /// there cannot take over, and without one that is gone nothing leaves.
    pub(super) fn heirs_recorded(
        &mut self,
        term: Term,
        heirs: BTreeSet<NodeId>,
        out: &mut Vec<Action>,
    ) {
        let State::Reigning(reign) = &mut self.state else { return };
        if reign.term != term {
            return;
        }
        if reign.asked.as_ref() == Some(&heirs) {
            reign.asked = None;
        }
        let changed = std::mem::replace(&mut reign.heirs, heirs.clone()) != heirs;
        if changed {
            self.protection_changed(out);
        }
        self.keep_heirs(out);
        self.begin_wanted(out);
    }

    pub(super) fn keep_heirs(&mut self, out: &mut Vec<Action>) {
        let State::Reigning(reign) = &mut self.state else { return };
        let wanted = reign.wanted_heirs();
        let known = reign.asked.as_ref().unwrap_or(&reign.heirs);
        if reign.lease_until != Nanos::MAX && *known != wanted {
            let renewal = reign.renewal();
            out.push(renewal);
        }
    }

    pub(super) fn lease_extended(&mut self, now: Nanos, until: Nanos, out: &mut Vec<Action>) {
        let State::Reigning(reign) = &mut self.state else { return };
        reign.lease_until = reign.lease_until.max(until);
        if reign.lease_until > now && std::mem::take(&mut reign.suspended) {
            out.push(Action::Resume);
            self.send_beat(out);
        }
    }

    pub(super) fn stood_still(&mut self, now: Nanos, for_ns: Nanos) {
        let State::Reigning(reign) = &mut self.state else { return };
        let later = |at: Nanos| at.saturating_add(for_ns).min(now);
        for spare in reign.spares.values_mut() {
            spare.joined_at = later(spare.joined_at);
            spare.heard_at = spare.heard_at.map(later);
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
        let Some(gone) = reign.spares.remove(&node) else { return };
        if let Some(cause) = drop {
            out.push(Action::DropSpare { node, cause });
        }
        if gone.picked {
            out.push(Action::AwaitSpares(reign.picked()));
        }
        if reign.wanted_at.take_if(|(to, _)| *to == node).is_some() {
            out.push(Action::SwitchoverImpossible);
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
        self.pick_spares(out);
        let State::Reigning(reign) = &mut self.state else { return };
        out.push(Action::TellMembers(reign.members()));
        self.keep_heirs(out);
        self.protection_changed(out);
    }

    /// Lets output wait for as many spares as the quorum wants, the first in the queue, and for
    /// each until that is gone: one that does not know yet that it only stands by might take over.
    /// So the one that was never told to is waited for in any case.
    fn pick_spares(&mut self, out: &mut Vec<Action>) {
        let State::Reigning(reign) = &mut self.state else { return };
        let wanted = self.config.quorum.of(reign.spares.len());
        let taken = reign.spares.values().filter(|spare| spare.picked || !spare.stands_by).count();
        let missing = wanted.saturating_sub(taken);
        let has_ghost = |spare: &&mut Spare| !spare.picked && spare.acknowledged.is_some();
        let fit = reign.spares.values_mut().filter(has_ghost);
        let (mut fit, more): (Vec<_>, Vec<_>) = fit.partition(|spare| spare.stands_by);
        fit.sort_by_key(|spare| spare.rank);
        fit.truncate(missing);
        fit.extend(more);
        let changed = !fit.is_empty();
        fit.into_iter().for_each(|spare| spare.picked = true);
        if changed {
            out.push(Action::AwaitSpares(reign.picked()));
        }
    }

    /// Output waits for these from now on. They count once they know what was shown before.
    pub(super) fn awaited(
        &mut self,
        nodes: &BTreeSet<NodeId>,
        shown: Position,
        out: &mut Vec<Action>,
    ) {
        let State::Reigning(reign) = &mut self.state else { return };
        let mut count = false;
        for (_, spare) in reign.spares.iter_mut().filter(|(node, _)| nodes.contains(node)) {
            if spare.picked && spare.counts_from.is_none() {
                count |= spare.changed(|spare| spare.counts_from = Some(shown));
            }
        }
        if count {
            self.spares_changed(out);
            self.begin_wanted(out);
        }
    }

    fn protection_changed(&mut self, out: &mut Vec<Action>) {
        let State::Reigning(reign) = &mut self.state else { return };
        let protected = reign.spares.keys().any(|node| reign.could_take_over(*node));
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
                // The spare that holds the offer died with its agent, or has left: it will not take
                // over.
                let gone = matches!(how, Closed::ByPeer | Closed::Goodbye);
                let heir = match &mut reign.phase {
                    Phase::Offered { to, term, claimed, left, .. } if *to == peer && gone => {
                        *left = true;
                        Some(if *claimed { *term } else { reign.term })
                    }
                    _ => None,
                };
                self.spare_gone(peer, None, out);
                if heir.is_some() {
                    self.reclaim(heir, out);
                }
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
                    if let Some(Claim { term, .. }) = f.claim.take_if(|claim| claim.offered) {
                        // To the primary that leaves, too, this says that we will not reign in that
                        // term, even if the arbiter is about to give it.
                        self.seen = self.seen.max(term);
                    }
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
        let joined = Spare {
            rank,
            acknowledged: None,
            picked: false,
            counts_from: None,
            // Nothing is shown to anybody before the first of them has all of it.
            stands_by: reign.spares.keys().any(|other| *other != node),
            joined_at: now,
            heard_at: None,
            hears: false,
        };
        let was_picked = reign.spares.insert(node, joined).is_some_and(|before| before.picked);
        if was_picked {
            out.push(Action::AwaitSpares(reign.picked()));
        }
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
        let first = spare.acknowledged.is_none();
        let counts = spare.changed(|spare| {
            spare.acknowledged = spare.acknowledged.max(Some(position));
        });
        if counts || first {
            self.spares_changed(out);
            self.begin_wanted(out);
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

    pub(super) fn switchover_asked(
        &mut self,
        now: Nanos,
        to: Option<NodeId>,
        out: &mut Vec<Action>,
    ) {
        let State::Reigning(reign) = &mut self.state else {
            return out.push(Action::SwitchoverImpossible);
        };
        let fit = reign
            .spares
            .iter()
            .filter(|(node, spare)| spare.is_ready() && to.is_none_or(|wanted| wanted == **node))
            .min_by_key(|(node, spare)| (!reign.could_take_over(**node), spare.rank))
            .map(|(node, _)| *node);
        let is_free = reign.phase == Phase::Running && reign.wanted_at.is_none();
        let Some(to) = fit.filter(|_| is_free) else {
            return out.push(Action::SwitchoverImpossible);
        };
        reign.wanted_at = Some((to, now.saturating_add(self.config.handover_ns)));
        // One that only stands by has to count first.
        let picked = reign.spares.get_mut(&to).map(|spare| &mut spare.picked);
        if picked.is_some_and(|picked| !std::mem::replace(picked, true)) {
            out.push(Action::AwaitSpares(reign.picked()));
        }
        self.begin_wanted(out);
    }

    /// Begins the switchover that is wanted, once the spare could take over.
    fn begin_wanted(&mut self, out: &mut Vec<Action>) {
        let State::Reigning(reign) = &mut self.state else { return };
        let Some((to, _)) = reign.wanted_at else { return };
        if !reign.could_take_over(to) || reign.phase != Phase::Running {
            return;
        }
        reign.wanted_at = None;
        reign.phase = Phase::Freezing { to, frozen_at: None };
        // From here on `to` is first in the queue, so that no other spare claims what it is given.
        out.push(Action::TellMembers(reign.members()));
        out.push(Action::FreezeGuest { to });
    }

    /// A spare that could not take over for so long.
    pub(super) fn watch_wanted(&mut self, now: Nanos, out: &mut Vec<Action>) {
        let State::Reigning(reign) = &mut self.state else { return };
        if reign.wanted_at.take_if(|(_, until)| now >= *until).is_some() {
            out.push(Action::SwitchoverImpossible);
        }
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
            let (claimed, left, reclaim) = (false, false, None);
            reign.phase = Phase::Offered { to, term, give_up_at, claimed, left, reclaim };
            out.push(Action::OfferSwitchover { to, term, position });
        }
    }

    /// An offer without an answer: only the arbiter can say whether it was taken.
    pub(super) fn watch_offer(&mut self, now: Nanos, out: &mut Vec<Action>) {
        let State::Reigning(reign) = &mut self.state else { return };
        let Phase::Offered { give_up_at, claimed, reclaim, .. } = reign.phase else { return };
        if now >= give_up_at && reclaim.is_none() {
            // A spare that claimed the term and fell silent has consented to nothing.
            let consent_of = (!claimed).then_some(reign.term);
            self.reclaim(consent_of, out);
        }
    }

    /// Takes the guest back in a term that is newer than the one offered.
    pub(super) fn reclaim(&mut self, consent_of: Option<Term>, out: &mut Vec<Action>) {
        let State::Reigning(reign) = &mut self.state else { return };
        let Phase::Offered { term, reclaim, .. } = &mut reign.phase else { return };
        if reclaim.is_none() {
            let newer = self.seen.max(*term).next();
            *reclaim = Some(newer);
            let by = consent_of.map_or(By::Heir, By::Word);
            out.push(Action::RequestTerm { term: newer, by });
        }
    }

    /// A heartbeat of the spare that was offered our term; false if it is not about that.
    ///
    /// Only when the guest runs there is the one here given up: a takeover that fails gives it
    /// back, and while it goes on there is time.
    pub(super) fn hear_heir(&mut self, now: Nanos, beat: Beat, out: &mut Vec<Action>) -> bool {
        let State::Reigning(reign) = &mut self.state else { return false };
        let Phase::Offered { to, term, give_up_at, claimed, reclaim, .. } = &mut reign.phase else {
            return false;
        };
        if beat.term < *term {
            return false;
        }
        let heir = *to == beat.from;
        if let Some(wanted) = *reclaim
            && !(heir && beat.role == BeatRole::Primary)
        {
            return beat.term < wanted;
        }
        if !heir {
            // Spares that follow the heir already: its own word counts.
            return beat.term == *term && !beat.leads();
        }
        match beat.role {
            BeatRole::Primary => self.fence(FenceCause::SwitchedOver, out),
            BeatRole::TakingOver => {
                *claimed = true;
                *give_up_at = now.saturating_add(self.config.handover_ns);
            }
            BeatRole::TakeoverFailed => {
                self.reclaim(Some(beat.term), out);
            }
            BeatRole::SpareSyncing
            | BeatRole::SpareReady
            | BeatRole::Fenced
            | BeatRole::Suspended => return false,
        }
        true
    }

    pub(super) fn freeze_failed(&mut self, out: &mut Vec<Action>) {
        if let State::Reigning(Reign { phase: Phase::Freezing { .. }, .. }) = &self.state {
            self.thaw(out);
            out.push(Action::SwitchoverImpossible);
        }
    }

    pub(super) fn switchover_refused(&mut self, node: NodeId, out: &mut Vec<Action>) {
        let State::Reigning(reign) = &self.state else { return };
        let Phase::Offered { to, term, claimed, .. } = reign.phase else { return };
        if to != node {
            return;
        }
        if claimed || self.seen >= term {
            // It had taken the term, and gives it back.
            self.reclaim(Some(term), out);
        } else {
            self.thaw(out);
            out.push(Action::SwitchoverImpossible);
        }
    }

    /// All spares have to join anew: they follow another term.
    pub(super) fn drop_all_spares(&mut self, out: &mut Vec<Action>) {
        let State::Reigning(reign) = &mut self.state else { return };
        for node in std::mem::take(&mut reign.spares).into_keys() {
            out.push(Action::DropSpare { node, cause: DropCause::NewTerm });
        }
        out.push(Action::AwaitSpares(BTreeSet::new()));
        self.spares_changed(out);
    }

    /// Primaries of older terms that are not heard any more have stopped their guests, or are cut
    /// off again; either way the neighbours should be told where the address is.
    pub(super) fn watch_rivals(&mut self, now: Nanos, out: &mut Vec<Action>) {
        let State::Reigning(reign) = &mut self.state else { return };
        let silence_ns = self.config.silence_ns;
        let before = reign.rivals.len();
        reign.rivals.retain(|_, heard_at| now.saturating_sub(*heard_at) < silence_ns);
        if reign.rivals.len() < before {
            out.push(Action::AnnounceAgain);
        }
    }

    pub(super) fn thaw(&mut self, out: &mut Vec<Action>) {
        let State::Reigning(reign) = &mut self.state else { return };
        reign.phase = Phase::Running;
        out.push(Action::ThawGuest { term: reign.term });
        out.push(Action::TellMembers(reign.members()));
        self.keep_heirs(out);
        self.send_beat(out);
    }
}

impl Spare {
    /// Changes it; whether it has all that clients have seen since that.
    fn changed(&mut self, change: impl FnOnce(&mut Spare)) -> bool {
        let before = self.has_all_shown();
        change(self);
        let counts = self.has_all_shown();
        self.stands_by &= !counts;
        counts && !before
    }

    /// Nothing was shown, or will be, that it does not have.
    fn has_all_shown(&self) -> bool {
        let early = mutate::is(Mutation::EarlyHeir) && self.picked;
        early || self.counts_from.is_some_and(|from| self.acknowledged >= Some(from))
    }

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
            heirs: BTreeSet::new(),
            asked: None,
            suspended: false,
            phase,
            spares: BTreeMap::new(),
            protected: false,
            wanted_at: None,
            rivals: BTreeMap::new(),
        };
        reign.lease(now, until);
        reign
    }

    /// Renewals come four times in a lease.
    pub(super) fn lease(&mut self, now: Nanos, until: Nanos) {
        self.lease_until = until;
        self.renew_at = match until {
            Nanos::MAX => Nanos::MAX,
            _ => now.saturating_add(until.saturating_sub(now) / 4),
        };
    }

    /// Who should be able to take the term. While it changes hands that stays as it is.
    fn wanted_heirs(&self) -> BTreeSet<NodeId> {
        if let Phase::TakingOver | Phase::Offered { .. } = self.phase {
            return self.heirs.clone();
        }
        let fit = self.spares.iter().filter(|(_, spare)| spare.is_ready() && spare.has_all_shown());
        fit.map(|(node, _)| *node).collect()
    }

    /// Whether this spare could take over from us.
    fn could_take_over(&self, node: NodeId) -> bool {
        let none = self.lease_until == Nanos::MAX;
        let fit = |spare: &Spare| spare.is_ready() && spare.has_all_shown();
        self.spares.get(&node).is_some_and(fit) && (none || self.heirs.contains(&node))
    }

    /// Spares that output waits for, or is about to.
    fn picked(&self) -> BTreeSet<NodeId> {
        let picked = self.spares.iter().filter(|(_, spare)| spare.picked);
        picked.map(|(node, _)| *node).collect()
    }

    /// Until when a switchover may wait for its spare.
    pub(super) fn wanted_until(&self) -> Nanos {
        self.wanted_at.map_or(Nanos::MAX, |(_, until)| until)
    }

    fn renewal(&mut self) -> Action {
        let heirs = self.wanted_heirs();
        self.asked = Some(heirs.clone());
        Action::RenewTerm { term: self.term, heirs }
    }

    pub(super) fn hear_rival(&mut self, now: Nanos, beat: Beat, out: &mut Vec<Action>) {
        let known = self.rivals.contains_key(&beat.from);
        if beat.term < self.term && beat.leads() {
            if known || self.rivals.len() < PEERS_MAX {
                self.rivals.insert(beat.from, now);
            }
        } else if known && beat.role == BeatRole::Fenced {
            self.rivals.remove(&beat.from);
            out.push(Action::AnnounceAgain);
        }
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
                stands_by: spare.stands_by,
            })
            .collect()
    }
}
