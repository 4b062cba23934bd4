"""The text that `kvx bench accuracy` has a model read: plain prose, written for it, so that no model has seen it in training."""

TEXT = """\
The harbour of Linden Bay has two lighthouses, and only one of them works. The older one was built of grey stone in 1862, when coal
ships came up the coast every week and the captains complained that the sandbank moved faster than the maps. Its lamp burned whale
oil at first, then paraffin, and for the last thirty years of its life an electric bulb no larger than a melon. The newer one is a
steel mast with a solar panel. It has no keeper, no stairs and no door. Once a year a technician climbs a ladder, wipes the glass,
changes the battery and drives home before lunch.

When the council proposed to pull the old tower down, nobody expected an argument. The roof leaked, the railing had rusted through,
and the insurance cost more than the museum earned in a good summer. But at the meeting in March the hall was full. A retired
teacher said that she had taken forty classes to the top, and that every child had counted the same one hundred and nineteen steps
and reported a different number. A fisherman said that he still steered by the tower in daylight, because a mast is thin and a tower
is not. A girl of nine asked where the owls would live. The mayor, who had prepared a short speech about the budget, put the paper
back into his pocket and asked how much a new roof would cost.

The first estimate was eighty thousand. The second, from a company that had looked at the walls, was one hundred and forty thousand,
because water had been running down inside the stone for twenty years and the mortar had turned to sand. The engineer explained it
with a sugar cube and a cup of tea. If you leave the top of the cube dry, she said, nothing happens. If one drop comes in every
minute, the cube keeps its shape for a long time, and then all at once it does not. She recommended to cover the roof with a
tarpaulin before the winter, to measure the cracks every month, and to decide in spring.

So the measuring began. A class from the secondary school glued small glass plates across eleven cracks and wrote the date beside
each of them. A plate that breaks shows that the wall has moved. By December two plates were broken, both on the side that faces the
sea. The physics teacher drew a graph of the width of the widest crack against the temperature of the air, and the points lay almost
on a straight line: the wall was not falling, it was breathing. In the cold the stone became shorter and the crack opened by half a
millimetre; in the sun it closed again. Only one crack, low down on the north side, grew a little with every storm and never went
back. The engineer was pleased. A wall with one real problem, she told the council, is a wall that can be repaired.

Money was harder than mortar. A bank offered a loan at a rate that made the treasurer laugh. A foundation in the capital sent a form
of sixty pages, in which the question about visitors appeared three times with different words. In the end the town did what it had
done in 1862, when the first tower was paid for by a tax on coal: everybody gave a little. The bakery sold a bread in the shape of
a lighthouse, which was popular although it fell over in the oven. The choir sang in the boat shed. A man who had left the town as
a boy and now owned a shipping company in another country sent a cheque and a letter. In the letter he wrote that he had been lost
in fog once, at the age of eleven, in a rowing boat without a compass, and that the sound of the fog bell had told him which way was
home. He asked for one thing only: that the bell be rung again, at noon, on the first day of the year.

The scaffolding came down on the last Friday in September. The new roof is copper, and for a few weeks it shone so brightly that the
pilots of the small planes that carry the mail used it as a landmark. Now it is brown, and in some years it will be green. The owls
moved to the boat shed during the work, complained about the choir, and came back. There are still one hundred and nineteen steps.
The museum has put a sign at the bottom with the number on it, and every child who reaches the top reports a different one.
"""
