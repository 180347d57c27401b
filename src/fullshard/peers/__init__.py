"""How ranks watch each other: which is lost, slow, or on another path.

    flight_record     each rank enters what it does next, and notes which units it ran; one a group
    agreed_order      ranks that share no memory agree on an entry before they start what it stands for
    watchdog          a thread sees that its rank stands still, says so, and ends what can never go on
    status_board      carries what ranks say of themselves (status): memory, store, connections
    divergence        finds where records differ, and brings one rank's words to all
    diagnosis         judges and words what is wrong, from statuses, entries and trails (paths) alone
    waits             reports of slow ranks; the names of those that are gone

Below them: stacks (where a thread is), store (asked in calls that end in time), groups (process groups and their backends).

What a rank that does not come is called, by what is known of it:

    late              it has entered less than this one
    unreached         its connection broke, and may come back
    missing           its watchdog does not answer
    lost              its process has ended
    gone              it takes part in nothing any more: lost, or it has said that it leaves, ends, or raises an error for all
"""
